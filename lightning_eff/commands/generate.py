"""Continue a prompt with a checkpoint of a language model, or answer the prompt by a chat template.

`Trainer.predict` runs with the prompt as a single batch, so precision, adapters and quantization are the same
as in the run. `torch_compile` is off, because it would compile the model again for each length of the text.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import Any

from lightning_eff.commands._saved_run import SavedRun, find_saved_run
from lightning_eff.core.errors import EXIT_OK, ConfigError, UsageError
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import Launch, num_ranks


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    prompt = _read_prompt(options)
    saved = find_saved_run(options, Launch.of())
    if num_ranks(saved.values["trainer"]) > 1:
        raise UsageError("generate: it runs on one device\n  try: trainer.devices=1 strategy=auto")
    with redirect_stdout(sys.stderr):  # the model may print
        found = _generate(saved, options, prompt)
    if options.json:
        print_json(found)
        return EXIT_OK
    sys.stderr.write(f"generate: {found['checkpoint']} (ckpt_path={saved.which}, step {found['step']})\n")
    sys.stderr.writelines(f" note: {note}\n" for note in saved.notes)
    for number, text in enumerate(found["texts"], 1):
        if options.num_samples > 1:
            sys.stdout.write(f"--- sample {number} of {options.num_samples} ---\n")
        sys.stdout.write(f"{'' if options.chat else prompt}{text}\n")
    return EXIT_OK


def _read_prompt(options: argparse.Namespace) -> str:
    """Return the prompt from `--prompt`, or from stdin without the final line break.

    Raises:
        UsageError: There is no prompt.
    """
    prompt = options.prompt
    if prompt is None and sys.stdin is not None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt or (options.system is not None and not options.chat):
        text = "generate: --system needs --chat" if prompt else "generate: there is no prompt"
        text += "\n  try: --chat" if prompt else "\n  try: --prompt 'Once upon a time'"
        raise UsageError(text)
    return prompt


def _generate(saved: SavedRun, options: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """Load a checkpoint and continue the prompt; return the texts in plain types.

    Raises:
        ConfigError: The model is not a language model, or the prompt is too long.
        UsageError: The template or the model rejects the prompt or an option.
    """
    import torch
    from torch.utils.data import DataLoader

    from lightning_eff.monitors.text_sample import check_language_model, continue_prompt, encode_prompt

    callbacks = {k: v for k, v in (saved.values.get("callbacks") or {}).items() if k != "torch_compile"}
    one_batch = saved.values["trainer"] | {"limit_predict_batches": 1}
    trainer, data, model, found = saved.build(callbacks=callbacks, monitors={}, trainer=one_batch)
    if hasattr(model, "generate") and not hasattr(data, "tokenizer"):
        data.prepare_data()  # may train a tokenizer, which is then cached
        data.setup("predict")
    check_language_model(model, data, user="generate")
    ids = _chat_prompt(data, prompt, options.system) if options.chat else encode_prompt(data, prompt)
    context = getattr(model, "context_length", len(ids))
    if len(ids) > context:
        key, allowed = "--prompt", f"at most {context}, the context of the model"
        raise ConfigError(key, f"{len(ids)} tokens", allowed=allowed, remedies=["a shorter prompt"])
    # Options that the user did not type are not passed, so that a model's own generation config applies.
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    typed = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if len(typed) > 1 or options.seed is not None or options.num_samples > 1:
        typed["do_sample"] = True
    drawing = {"seed": options.seed or 0, "num_samples": options.num_samples}

    def predict_step(batch: Any, batch_idx: int) -> list[list[int]]:  # noqa: ARG001 - Lightning's signature
        try:
            return continue_prompt(model, ids, typed, **drawing)
        except ValueError as error:
            raise UsageError(f"generate: {error}") from error

    # Lightning needs a loader with one batch; the step reads the prompt from `ids`.
    model.predict_step = predict_step
    loader: Any = DataLoader([torch.tensor(ids)])  # pyright: ignore[reportArgumentType]
    (rows,) = saved.run(trainer, model, dataloaders=loader)
    end = getattr(getattr(data, "training_tokenizer", None), "eos_id", None)
    # Tokens after the first end token are not part of the answer.
    rows = [row[: row.index(end)] if end in row else row for row in rows]
    # Decode the prompt with the text, since a tokenizer may drop the space before a first word.
    start = len(data.tokenizer.decode(ids, skip_special_tokens=True))
    texts = [data.tokenizer.decode([*ids, *row], skip_special_tokens=True)[start:] for row in rows]
    return {**found, "notes": saved.notes, "prompt": prompt, **typed, "tokens": rows, "texts": texts}


def _chat_prompt(data: Any, prompt: str, system: str | None) -> list[int]:
    """Apply the chat template of the data's tokenizer to a prompt; return the tokens up to the answer.

    Raises:
        UsageError: There is no template, or the template rejects the conversation.
    """
    tokenizer = getattr(data, "training_tokenizer", None)
    if tokenizer is None or not (tokenizer.has_own_template or data.field != "text"):
        raise UsageError(
            f"generate: the tokenizer of {type(data).__name__} has no chat template\n  try: without --chat"
        )
    turns = [] if system is None else [{"role": "system", "content": system}]
    try:
        return tokenizer.encode_chat_prompt([*turns, {"role": "user", "content": prompt}])
    except ValueError as error:
        raise UsageError(f"generate: {error}") from error
