"""`bench --suite gpu`: which parts run, with what, and what is printed of them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from lightning_eff.commands._bench import gpu_suite
from lightning_eff.commands._bench.gpu_claims import summary_rows
from lightning_eff.commands._bench.gpu_parts import PARTS
from lightning_eff.commands._bench.gpu_suite import FILE, MINUTES, Part, Raw, Setting
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, EnvironmentLacksError, UsageError, suggest_name
from lightning_eff.core.text import text_table

OUT = Path("outputs/gpu_suite")
CLAIM_HEADER = ("claim", "target (ambitious)", "measured", "verdict")
MEANINGLESS = "the smallest sizes: the figures mean nothing, but that every part runs"


def main(options: argparse.Namespace, start: gpu_suite.Start = gpu_suite.run_in_process) -> int:
    """Run the parts, and print the table of claims."""
    parts = chosen(options.only)
    is_cuda = torch.cuda.is_available()
    if not (is_cuda or options.quick):
        text = "bench: torch finds no CUDA device; the suite needs an NVIDIA GPU"
        text += "\n  try: --quick\n  try: lightning-eff doctor"
        raise EnvironmentLacksError(text)
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    folder = options.out or OUT
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["lightning-eff", "bench", *options.arguments])
    tokens = tuple(options.tokens) or Setting(device=device).tokens
    setting = Setting(device=device, quick=options.quick, tokens=tokens)
    raw = gpu_suite.begin_call(folder / FILE, setting, command, resume=options.resume)
    minutes = options.minutes or MINUTES
    gpu_suite.run_suite(parts, setting, raw, folder / FILE, minutes=minutes, start=start)
    sys.stdout.write(json.dumps(raw, indent=1) + "\n" if options.json else report(raw, setting))
    sys.stderr.write(f"all results: {folder / FILE}\n")
    return EXIT_FAILED if faults(raw) else EXIT_OK


def chosen(only: str | None) -> list[Part]:
    """Return the parts that `--only` names, in their own order.

    Raises:
        UsageError: There is no such part.
    """
    names = [part.name for part in PARTS]
    wanted = [word.strip() for word in only.split(",") if word.strip()] if only is not None else names
    for word in wanted:
        if word not in names:
            text = f"bench: no part is called {word!r}; {suggest_name(word, names)}"
            raise UsageError(text)
    return [part for part in PARTS if part.name in wanted]


def faults(raw: Raw) -> list[str]:
    """Return a line for each part or case that failed, and for each wrong result."""
    found: list[str] = []
    for name, part in raw["parts"].items():
        if part.get("state") == "failed":
            found.append(f"{name}: {part['reason']}")
        for case, result in part["cases"].items():
            if "error" in result:
                found.append(f"{name}, {case}: {result['error']}")
            found += [f"{name}, {case}: {where}: {why}" for where, why in result.get("wrong", {}).items()]
    return found


def report(raw: Raw, setting: Setting) -> str:
    """Return the tables of parts and of claims, and what failed."""
    rows = [
        [
            name,
            part.get("state", ""),
            str(len(part["cases"])),
            f"{part.get('seconds', 0):.0f}",
            part["reason"],
        ]
        for name, part in raw["parts"].items()
    ]
    sections = [
        "\n".join(f" {key}: {value}" for key, value in raw["environment"].items()),
        text_table(["part", "state", "cases", "s", "reason"], rows),
        MEANINGLESS if setting.quick else text_table(CLAIM_HEADER, summary_rows(raw)),
        *(f" FAILED {line}" for line in faults(raw)),
    ]
    return "\n\n".join(sections) + "\n"
