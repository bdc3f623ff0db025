"""Measure the tiled GEMM against torch's library; --tune lets it choose by what was measured here."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from typing_extensions import override

from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, ConfigError, EnvironmentLacksError, UsageError

if TYPE_CHECKING:
    import torch

    from lightning_eff.kernels.bench.candidates import Effort
    from lightning_eff.kernels.bench.comparison import CaseComparison
    from lightning_eff.report.gemm_table import GemmReport

USAGE = """lightning-eff bench [--quick] [--tune] [--explain DEVICE] [--shapes M,N,K[;...]] [--dtype NAME]
                    [--out DIR] [--json]

  bench                            linear layers of language models on a GPU; without one, torch's library
                                   on this CPU, and the machine code of each kernel for Hopper
  bench --quick                    a few small shapes
  bench --tune                     measure every config that fits; `gemm` chooses by that from now on
  bench --explain h200             measure nothing: which tile each shape would get there, and what is lost;
                                   h100, h200, a100, rtx4090, b200 or cpu
  bench --shapes '4096,4096,4096'  your own layers: tokens, output features, input features; each is three
                                   GEMMs, forward (nt), gradient of the input (nn) and of the weight (tn)
  bench --dtype fp16               bf16 (default), fp16 or fp32 operands; a CPU is timed in fp32
  bench --out DIR                  write gemm.json (raw numbers) and gemm.md (this table) there, and
                                   gemm.jsonl case by case
  bench --json                     print the raw numbers on the standard output

Each candidate is compared with float64 before it is timed. Exit code 1 when one is incorrect, 3 when --tune
finds no GPU."""

OPERAND_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUICK_ROUND_S = 0.002
CASE_BY_CASE = "gemm.jsonl"
"""File with one line per case, written as they are measured, so that an interrupted run keeps them."""
QUICK_TILES = 2
"""Configs that --quick compiles."""


def main(arguments: Sequence[str]) -> int:
    """Run `lightning-eff bench`, and return the exit code."""
    options = _parse(arguments)
    if options.explain:
        return _explain(options)
    device = _device(options)
    if options.out is not None:  # before minutes of measuring, not after them
        options.out.mkdir(parents=True, exist_ok=True)
    report = _measure(options, device)
    sys.stdout.write(json.dumps(report.as_dict(), indent=1) + "\n" if options.json else report.text())
    if options.out is not None:
        command = shlex.join(["lightning-eff", "bench", *arguments])
        date = datetime.now(UTC).isoformat(timespec="seconds")
        raw = {"command": command, "date": date} | report.as_dict()
        (options.out / "gemm.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        title = f"# The tiled GEMM and torch's library\n\n```console\n$ {command}\n```\n\n{date}"
        text = f"{title}\n\n```text\n{report.text()}```\n"
        (options.out / "gemm.md").write_text(text, encoding="utf-8")
    if options.tune:
        from lightning_eff.kernels import dispatch
        from lightning_eff.kernels.bench.comparison import fastest_by_bucket

        fastest = fastest_by_bucket(report.comparisons)
        path = dispatch.save_choices(dispatch.identity(device), fastest)
        choices = "1 choice" if len(fastest) == 1 else f"{len(fastest)} choices"
        sys.stderr.write(f"saved {choices} in {path}; processes that start now use them\n")
    return EXIT_FAILED if report.incorrect else EXIT_OK


class _Parser(argparse.ArgumentParser):
    """Raises a UsageError, which the command line turns into a message and an exit code."""

    @override
    def error(self, message: str) -> NoReturn:
        text = f"bench: {message}\n{USAGE}"
        raise UsageError(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line; `sizes` are M, N, K of `--shapes`, `dtype` is torch's name."""
    parser = _Parser(prog="lightning-eff bench", add_help=False, allow_abbrev=False)
    for flag in ("--quick", "--tune", "--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--explain", default="")
    parser.add_argument("--dtype", default="bf16")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}")
    if options.dtype not in OPERAND_DTYPES:
        allowed = f"one of {', '.join(OPERAND_DTYPES)}"
        raise ConfigError(key="--dtype", value=options.dtype, allowed=allowed, remedies=["--dtype bf16"])
    options.dtype = OPERAND_DTYPES[options.dtype]
    sizes: list[tuple[int, ...]] = []
    for shape in options.shapes.split(";") if options.shapes else ():
        numbers = [number.strip() for number in shape.split(",")]
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
            allowed = "M,N,K[;M,N,K...], whole numbers of at least 1"
            remedies = ["--shapes '4096,4096,4096'"]
            raise ConfigError(key="--shapes", value=options.shapes, allowed=allowed, remedies=remedies)
        sizes.append(tuple(map(int, numbers)))
    options.sizes = tuple(sizes)
    return options


def _explain(options: argparse.Namespace) -> int:
    import torch

    from lightning_eff.kernels.tiles import explain_tiles
    from lightning_eff.report import tile_explanation

    device = tile_explanation.known_device("--explain ", options.explain)
    sizes = options.sizes or tile_explanation.KNOWN_LAYERS
    dtype = getattr(torch, options.dtype)
    found = [explain_tiles(*size, dtype=dtype, device=device) for size in sizes]
    if options.json:
        pairs = zip(sizes, found, strict=True)
        rows = [{"shape": list(size), "words": list(layer.sentences())} for size, layer in pairs]
        sys.stdout.write(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
    else:
        sys.stdout.write("\n\n".join(map(str, found)) + "\n")
    return EXIT_OK


def _device(options: argparse.Namespace) -> torch.device:
    """Return the device to measure on; --tune fails here, before anything runs, if it lacks something."""
    import torch

    from lightning_eff.kernels.bench import assembly

    has_gpu = torch.cuda.is_available()
    missing = "" if has_gpu else "torch finds no CUDA device (torch.cuda.is_available() is False)"
    missing = missing or assembly.why_not_compiled()
    if options.tune and missing:
        text = (
            f"bench --tune: {missing}; it needs an NVIDIA GPU, torch for CUDA, and Triton\n"
            "  try: lightning-eff bench, without --tune"
        )
        raise EnvironmentLacksError(text)
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def _measure(options: argparse.Namespace, device: torch.device) -> GemmReport:
    import torch

    from lightning_eff.core import machine
    from lightning_eff.kernels.bench import assembly, candidates
    from lightning_eff.kernels.tile_configs import CONFIGS
    from lightning_eff.report.gemm_table import GemmReport

    on_gpu = device.type == "cuda"
    effort = candidates.Effort(every_row=options.tune)
    if options.quick:
        effort = candidates.Effort(every_row=options.tune, round_s=QUICK_ROUND_S)
    environment = machine.machine_info(device) | {"triton": machine.package_version("triton")}
    environment |= {"clocks before": machine.gpu_clocks(device)} if on_gpu else {}
    comparisons = _compare(options, device, effort)
    environment |= {"clocks after": machine.gpu_clocks(device)} if on_gpu else {}
    reason = assembly.why_not_compiled()
    configs = () if on_gpu or reason else CONFIGS
    configs = configs[:QUICK_TILES] if options.quick else configs
    compiled = assembly.compile_configs(configs, getattr(torch, options.dtype))
    return GemmReport(
        comparisons=comparisons, host=candidates.host_times(device, effort), compiled=compiled,
        not_compiled=reason, environment=environment, on_gpu=on_gpu,
    )  # fmt: skip


def _compare(options: argparse.Namespace, device: torch.device, effort: Effort) -> list[CaseComparison]:
    """Measure one case after another, with progress on stderr, and append each to a file of `--out`."""
    import torch

    from lightning_eff.kernels.bench import candidates, gemm_cases

    on_gpu = device.type == "cuda"
    dtype = getattr(torch, options.dtype) if on_gpu else torch.float32
    if options.sizes:
        layers = [gemm_cases.Layer(*size) for size in options.sizes]
        cases = gemm_cases.cases(layers, layers, dtype)
    elif options.quick:
        cases = gemm_cases.cases(gemm_cases.QUICK, gemm_cases.QUICK[:1], dtype)
    elif on_gpu:
        cases = gemm_cases.default_cases(dtype)
    else:
        cases = gemm_cases.cases(gemm_cases.ON_CPU, gemm_cases.ON_CPU, dtype)
    comparisons: list[CaseComparison] = []
    path = options.out / CASE_BY_CASE if options.out is not None else None
    if path is not None:
        path.write_text("", encoding="utf-8")
    for number, case in enumerate(cases, 1):
        sys.stderr.write(f"{number}/{len(cases)} {case} {case.layout} {case.kind}\n")
        comparisons.append(candidates.compare_case(case, device, effort))
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(comparisons[-1].as_dict()) + "\n")
    return comparisons
