"""Measure the tiled GEMM beside torch's library; --tune lets it choose by what was measured here."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from typing_extensions import override

from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, ConfigError, EnvironmentLacksError, UsageError

if TYPE_CHECKING:
    import torch

    from lightning_eff.kernels.bench.candidates import Effort
    from lightning_eff.kernels.bench.comparison import CaseComparison
    from lightning_eff.kernels.bench.gemm_cases import Case
    from lightning_eff.report.gemm_table import GemmReport

USAGE = """lightning-eff bench [--quick] [--tune] [--explain DEVICE] [--shapes M,N,K[;...]] [--dtype NAME]
                    [--out DIR] [--json]

  bench                            linear layers of language models on a GPU; without one, torch's library
                                   on this processor, and what the compiler says of each kernel for Hopper
  bench --quick                    a few small shapes
  bench --tune                     measure every row that fits, and let `gemm` choose by that from now on
  bench --explain h200             measure nothing: which tile each shape would get there, and what is lost;
                                   h100, h200, a100, rtx4090, b200 or cpu
  bench --shapes '4096,4096,4096'  layers of your own: tokens, output features, input features; each is three
                                   GEMMs, forward (nt), gradient of the input (nn) and of the weight (tn)
  bench --dtype fp16               bf16 (unless given), fp16 or fp32 operands; a processor is timed in fp32
  bench --out DIR                  write gemm.json (raw numbers) and gemm.md (this table) there, and
                                   gemm.jsonl case by case
  bench --json                     print the raw numbers on the standard output

Each candidate is compared with float64 before it is timed. Exit code 1 when one is incorrect, 3 when --tune
finds no GPU."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUICK_ROUND_S = 0.002
CASE_BY_CASE = "gemm.jsonl"
"""File with one line a case, written as they are measured: what is left of a run that is cut off."""
QUICK_TILES = 2
"""Rows that --quick compiles."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line.

    Args:
        quick: A few small shapes.
        tune: Measure every row, and keep what is fastest.
        explain: Name of a device to explain shapes for; empty to measure.
        as_json: Print raw numbers.
        out: Folder for files.
        sizes: Tokens, outputs and inputs of layers; empty for the list.
        dtype: Name in torch of the operands' format.
    """

    quick: bool
    tune: bool
    explain: str
    as_json: bool
    out: Path | None
    sizes: tuple[tuple[int, int, int], ...]
    dtype: str


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    asked = _parse(arguments)
    if asked.explain:
        return _explain(asked)
    device = _device(asked)
    if asked.out is not None:  # before minutes of measuring, not behind them
        asked.out.mkdir(parents=True, exist_ok=True)
    report = _measure(asked, device)
    if asked.as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1) + "\n")
    else:
        sys.stdout.write(report.text())
    if asked.out is not None:
        _write(report, asked.out, arguments)
    if asked.tune:
        _keep(report.comparisons, device)
    return EXIT_FAILED if report.incorrect else EXIT_OK


class _Parser(argparse.ArgumentParser):
    """Raises what the command line turns into a few lines and an exit code."""

    @override
    def error(self, message: str) -> NoReturn:
        text = f"bench: {message}\n{USAGE}"
        raise UsageError(text)


def _parse(arguments: Sequence[str]) -> Asked:
    parser = _Parser(prog="lightning-eff bench", add_help=False, allow_abbrev=False)
    for flag in ("--quick", "--tune", "--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--explain", default="")
    parser.add_argument("--dtype", default="bf16")
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        text = f"bench: unknown argument {unknown[0]!r}\n{USAGE}"
        raise UsageError(text)
    if found.dtype not in DTYPES:
        allowed = f"one of {', '.join(DTYPES)}"
        raise ConfigError(key="--dtype", value=found.dtype, allowed=allowed, remedies=["--dtype bf16"])
    return Asked(
        quick=found.quick,
        tune=found.tune,
        explain=found.explain,
        as_json=found.json,
        out=found.out,
        sizes=_sizes(found.shapes) if found.shapes else (),
        dtype=DTYPES[found.dtype],
    )


def _sizes(text: str) -> tuple[tuple[int, int, int], ...]:
    sizes: list[tuple[int, int, int]] = []
    for part in text.split(";"):
        words = [word.strip() for word in part.split(",")]
        if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words):
            allowed = "M,N,K[;M,N,K...], whole numbers of at least 1"
            raise ConfigError(
                key="--shapes", value=text, allowed=allowed, remedies=["--shapes '4096,4096,4096'"]
            )
        sizes.append((int(words[0]), int(words[1]), int(words[2])))
    return tuple(sizes)


def _explain(asked: Asked) -> int:
    import torch

    from lightning_eff.report import tile_explanation

    device = tile_explanation.known_device("--explain ", asked.explain)
    sizes = asked.sizes or tile_explanation.LAYERS
    found = tile_explanation.explain_layers(device, sizes, getattr(torch, asked.dtype))
    if asked.as_json:
        pairs = zip(sizes, found, strict=True)
        rows = [{"shape": list(each), "words": list(one.sentences())} for each, one in pairs]
        sys.stdout.write(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
    else:
        sys.stdout.write("\n\n".join(map(str, found)) + "\n")
    return EXIT_OK


def _device(asked: Asked) -> torch.device:
    """Return where to measure, and say what tuning lacks before anything runs."""
    import torch

    from lightning_eff.kernels.bench import rows

    has_gpu = torch.cuda.is_available()
    lacks = "" if has_gpu else "torch finds no CUDA device (torch.cuda.is_available() is False)"
    lacks = lacks or rows.not_compiled()
    if asked.tune and lacks:
        text = (
            f"bench --tune: {lacks}; expected an NVIDIA GPU, torch for CUDA, and Triton\n"
            "  try: lightning-eff bench, without --tune"
        )
        raise EnvironmentLacksError(text)
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def _measure(asked: Asked, device: torch.device) -> GemmReport:
    import torch

    from lightning_eff.core import machine
    from lightning_eff.kernels.bench import candidates, rows
    from lightning_eff.kernels.tile_configs import CONFIGS
    from lightning_eff.report.gemm_table import GemmReport

    on_gpu = device.type == "cuda"
    effort = candidates.Effort(every_row=asked.tune)
    if asked.quick:
        effort = candidates.Effort(every_row=asked.tune, round_s=QUICK_ROUND_S)
    facts = machine.describe(device) | {"triton": machine.version("triton")}
    facts |= {"clocks before": machine.clocks(device)} if on_gpu else {}
    comparisons = _compare(_cases(asked, on_gpu=on_gpu), device, effort, asked.out)
    facts |= {"clocks after": machine.clocks(device)} if on_gpu else {}
    reason = rows.not_compiled()
    tiles = () if on_gpu or reason else CONFIGS[:QUICK_TILES] if asked.quick else CONFIGS
    return GemmReport(
        comparisons=comparisons,
        host=candidates.host_times(device, effort),
        compiled=rows.compiled(tiles, getattr(torch, asked.dtype)),
        not_compiled=reason,
        environment=facts,
        on_gpu=on_gpu,
    )


def _cases(asked: Asked, *, on_gpu: bool) -> list[Case]:
    import torch

    from lightning_eff.kernels.bench import gemm_cases

    dtype = getattr(torch, asked.dtype) if on_gpu else torch.float32
    if asked.sizes:
        own = [gemm_cases.Layer(*sizes) for sizes in asked.sizes]
        return gemm_cases.cases(own, own, dtype)
    if asked.quick:
        return gemm_cases.cases(gemm_cases.QUICK, gemm_cases.QUICK[:1], dtype)
    return (
        gemm_cases.default_cases(dtype)
        if on_gpu
        else gemm_cases.cases(gemm_cases.ON_CPU, gemm_cases.ON_CPU, dtype)
    )


def _compare(
    cases: Sequence[Case], device: torch.device, effort: Effort, folder: Path | None
) -> list[CaseComparison]:
    """Measure one case after the other, say so, since it takes minutes, and keep each in a folder."""
    from lightning_eff.kernels.bench import candidates

    found: list[CaseComparison] = []
    if folder is not None:
        (folder / CASE_BY_CASE).write_text("", encoding="utf-8")
    for number, case in enumerate(cases, 1):
        sys.stderr.write(f"{number}/{len(cases)} {case} {case.layout} {case.kind}\n")
        found.append(candidates.compare_case(case, device, effort))
        if folder is not None:
            with (folder / CASE_BY_CASE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1].as_dict()) + "\n")
    return found


def _write(report: GemmReport, folder: Path, arguments: Sequence[str]) -> None:
    command = shlex.join(["lightning-eff", "bench", *arguments])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    raw = {"command": command, "date": date} | report.as_dict()
    (folder / "gemm.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    title = f"# The tiled GEMM beside torch's library\n\n```console\n$ {command}\n```\n\n{date}"
    (folder / "gemm.md").write_text(f"{title}\n\n```text\n{report.text()}```\n", encoding="utf-8")


def _keep(comparisons: Sequence[CaseComparison], device: torch.device) -> None:
    from lightning_eff.kernels import dispatch
    from lightning_eff.kernels.bench.comparison import fastest_by_bucket

    choices = fastest_by_bucket(comparisons)
    path = dispatch.save_choices(dispatch.identity(device), choices)
    sys.stderr.write(f"{len(choices)} choices are in {path}; processes that start now go by them\n")
