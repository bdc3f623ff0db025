"""Continue a prompt with a checkpoint of a language model, or answer it by a chat template."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from lightning_eff.commands._generation import Asked, generate
from lightning_eff.commands._rank import told_to_parent
from lightning_eff.commands._saved_run import SavedRun, find_saved_run
from lightning_eff.core.errors import EXIT_OK, ConfigError, UsageError, check_path
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import Launch, num_ranks

SAMPLE_LINE = "--- sample {} of {} ---\n"


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with told_to_parent(launch):
        asked = _asked(options)
        saved = find_saved_run(options, launch)
        ranks = num_ranks(saved.values["trainer"])
        if ranks > 1:
            allowed = "1: generate runs on one device"
            raise ConfigError(
                key="trainer.devices", value=ranks, allowed=allowed, remedies=["trainer.devices=1"]
            )
        _show(asked, saved, as_json=options.json)
    return EXIT_OK


def _show(asked: Asked, saved: SavedRun, *, as_json: bool) -> None:
    """Write what the model writes: one text token by token, several once all are there."""
    out = sys.stdout

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    streams = not as_json and asked.num_samples == 1
    shown_prompt = "" if asked.is_chat else asked.prompt
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        found = generate(saved, asked, write if streams else None)
    if as_json:
        print_json(found)
    elif streams:
        write("\n")
    else:
        for number, text in enumerate(found["texts"], 1):
            write(SAMPLE_LINE.format(number, asked.num_samples) + shown_prompt + text + "\n")
    for note in found["notes"]:
        sys.stderr.write(f" note: {note}\n")


def _asked(options: argparse.Namespace) -> Asked:
    """Check the verb's options, before anything is loaded.

    Raises:
        ConfigError: A value is out of range.
        UsageError: Two options contradict each other, or there is no prompt.
    """
    drawn = {
        "--top-k": options.top_k, "--top-p": options.top_p, "--seed": options.seed,
        "--num-samples": options.num_samples if options.num_samples != 1 else None,
    }  # fmt: skip
    sampling = [name for name, value in drawn.items() if value is not None]
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if sampling else 0.0
    for key, value, is_valid, allowed, remedy in (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "at least 1", "64"),
        ("--temperature", temperature, 0 <= temperature < math.inf, "a number of at least 0", "0.8"),
        ("--top-k", options.top_k, (options.top_k or 0) >= 1, "at least 1", "50"),
        ("--top-p", options.top_p, 0 < (options.top_p or 0) <= 1, "above 0 and at most 1", "0.95"),
        ("--num-samples", options.num_samples, options.num_samples >= 1, "at least 1", "1"),
        ("--seed", options.seed, 0 <= (options.seed or 0) < 2**63, "0 to 2**63 - 1", "0"),
    ):
        if value is not None and not is_valid:
            raise ConfigError(key, value, allowed=allowed, remedies=[f"{key} {remedy}"])
    if temperature == 0 and sampling:
        allowed = f"above 0 with {sampling[0]}: at 0 nothing is drawn"
        raise ConfigError(
            key="--temperature", value=temperature, allowed=allowed, remedies=["--temperature 0.8"]
        )
    if options.system is not None and not options.chat:
        text = "generate: --system is a turn of a conversation\n  try: --chat"
        raise UsageError(text)
    return Asked(
        prompt=_prompt(options),
        is_chat=options.chat,
        system=options.system,
        max_new_tokens=options.max_new_tokens,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        num_samples=options.num_samples,
        seed=options.seed or 0,
    )


def _prompt(options: argparse.Namespace) -> str:
    """Return the prompt; of a file and of the standard input without the line break at the end."""
    if options.prompt is not None and options.prompt_file is not None:
        text = "generate: expected --prompt or --prompt-file, not both"
        raise UsageError(text)
    prompt, source = options.prompt, "--prompt"
    if prompt is None:
        source = options.prompt_file or "-"
        if source == "-":
            if sys.stdin is None or (options.prompt_file is None and sys.stdin.isatty()):
                text = "generate: which prompt?\n  try: --prompt 'Once upon a time'"
                raise UsageError(text)
            source = "standard input"
            try:
                prompt = sys.stdin.read()
            except UnicodeDecodeError:
                prompt = "\udcff"
        else:
            check_path("--prompt-file", source)
            try:
                prompt = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8"
                raise ConfigError(
                    key="--prompt-file", value=source, allowed=f"a text file ({reason})"
                ) from error
        prompt = prompt.removesuffix("\n")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python has read other bytes as halves of characters
        allowed = f"text in UTF-8; {source} has other bytes"
        raise ConfigError(key="--prompt", value=prompt[:40], allowed=allowed) from error
    if not prompt:
        raise ConfigError(
            key="--prompt", value=prompt, allowed=f"some text; {source} is empty", remedies=["--prompt 'The'"]
        )
    return prompt
