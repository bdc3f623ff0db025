"""Measure the tiled GEMM against torch's library on a GPU; --tune lets it choose by what was measured."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, EnvironmentLacksError, UsageError
from lightning_eff.core.text import text_table

if TYPE_CHECKING:
    import torch

    from lightning_eff.commands._bench.gemm_timing import Comparison

OPERAND_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ROUND_MS, QUICK_ROUND_MS = 20, 2
SMALL = ((256, 768, 768), (256, 3072, 768), (256, 768, 3072))
"""GPT-2's layers, for `--quick`: tokens, output features, input features."""
TWO_METHODS = (
    "Times are of CUDA graphs over rotating buffers, median (range) of the rounds; a ratio is the library's\n"
    "time over ours, the smaller one of that and of single calls after an emptied cache."
)


def check_options(options: argparse.Namespace) -> None:
    """Raise a UsageError for options that do not go together: none is ignored in silence."""
    modes = [name for name in ("tune", "suite", "blocking") if getattr(options, name)]
    if len(modes) > 1:
        text = f"bench --{' --'.join(modes)}: expected one of --tune, --suite gpu, --blocking"
        raise UsageError(text)
    if (options.recipe or options.overrides) and modes != ["tune"]:
        text = "bench: a recipe is for --tune"
        tried = (
            f"\n  try: lightning-eff bench --tune {options.recipe}" if options.recipe and not modes else ""
        )
        raise UsageError(text + tried)
    for name, mode in (("resume", "suite"), ("only", "suite"), ("tokens", "suite"), ("again", "tune")):
        if getattr(options, name) and modes != [mode]:
            text = f"bench --{name}: expected with --{mode}{' gpu' if mode == 'suite' else ' RECIPE'}"
            raise UsageError(text)
    if options.shapes and modes not in ([], ["tune"]):
        text = f"bench --{modes[0]} --shapes: expected without --shapes, since it measures fixed sizes"
        raise UsageError(text)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    check_options(options)
    if options.suite:
        from lightning_eff.commands._bench import gpu_run

        return gpu_run.main(options)
    if options.blocking:
        from lightning_eff.commands._bench import blocking

        return blocking.main(options)
    if options.recipe:
        from lightning_eff.config.recipes import RecipePath, read_chain

        read_chain(options.recipe, RecipePath.of(options.config_dir))  # a wrong name is one on any machine
    import torch

    from lightning_eff.commands._bench import gemm_timing
    from lightning_eff.core import machine
    from lightning_eff.kernels import choices

    reason = gemm_timing.why_no_kernels()
    if reason:
        text = f"bench: {reason}; it needs an NVIDIA GPU and Triton, and --blocking neither"
        text += "\n  try: lightning-eff bench --blocking\n  try: lightning-eff doctor"
        raise EnvironmentLacksError(text)
    device = torch.device("cuda", torch.cuda.current_device())
    environment = {
        "command": shlex.join(["lightning-eff", "bench", *options.arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.machine_info(device),
        "triton": machine.package_version("triton"),
        "clocks before": machine.gpu_clocks(device),
    }
    if options.recipe:
        from lightning_eff.commands._bench import tune

        return tune.main(options, device, environment)
    comparisons = _measure(options, device, environment)
    environment["clocks after"] = machine.gpu_clocks(device)
    numbers = _save(comparisons, environment, options.out)
    sys.stdout.write(numbers if options.json else _table(comparisons, environment))
    if options.tune:
        fastest = gemm_timing.fastest_by_bucket(comparisons)
        path = choices.save(device, fastest)
        count = "1 choice" if len(fastest) == 1 else f"{len(fastest)} choices"
        sys.stderr.write(f"saved {count} in {path}; processes that start now use them\n")
    is_correct = all(result.is_correct for each in comparisons for result in each.results.values())
    return EXIT_OK if is_correct else EXIT_FAILED


def _measure(
    options: argparse.Namespace, device: torch.device, environment: dict[str, Any]
) -> list[Comparison]:
    """Measure one case after another, with progress on stderr."""
    import torch

    from lightning_eff.commands._bench import gemm_problem, gemm_timing
    from lightning_eff.kernels import choices

    dtype = getattr(torch, OPERAND_DTYPES[options.dtype])
    layers = options.shapes or (SMALL if options.quick else ())
    cases = gemm_problem.cases_of(layers, layers, dtype) if layers else gemm_problem.default_cases(dtype)
    comparisons: list[Comparison] = []
    round_ms = QUICK_ROUND_MS if options.quick else ROUND_MS
    for number, case in enumerate(cases, 1):
        sys.stderr.write(f"{number}/{len(cases)} {case}\n")
        comparisons.append(gemm_timing.compare(case, device, round_ms=round_ms, every_config=options.tune))
        _save(comparisons, environment, options.out)
        if options.tune:
            choices.save(device, gemm_timing.fastest_by_bucket(comparisons))
    return comparisons


def _save(comparisons: Sequence[Comparison], environment: dict[str, Any], folder: Path | None) -> str:
    """Return the raw numbers as JSON, and write them into a folder."""
    rows = [comparison.as_dict() for comparison in comparisons]
    raw = {"environment": environment, "means": _means(comparisons), "rows": rows}
    numbers = json.dumps(raw, indent=1) + "\n"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gemm.json").write_text(numbers, encoding="utf-8")
    return numbers


def _means(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Return the geometric means of the plain cases' ratios; a case that was not timed is left out."""
    plain = [each for each in comparisons if each.case.kind == "plain"]
    ratios = {
        "best config": [each.ratio(each.best_config or "") for each in plain],
        "gemm": [each.ratio("gemm") for each in plain],
    }
    timed = {name: [ratio for ratio in values if ratio] for name, values in ratios.items()}
    return {name: geometric_mean(values) for name, values in timed.items() if values}


def _table(comparisons: Sequence[Comparison], environment: dict[str, Any]) -> str:
    header = ["M x N x K", "dtype", "library ms", "gemm ms", "ratio", "computed by"]
    header += ["library TFLOP/s", "best config", "ms", "ratio"]
    sections = [
        TWO_METHODS,
        "\n".join(f" {key}: {value}" for key, value in environment.items()),
        text_table(header, [_cells(comparison) for comparison in comparisons]),
    ]
    means = _means(comparisons)
    sections += [f" geometric mean of the ratios of {name}: {mean:.3f}" for name, mean in means.items()]
    for comparison in comparisons:
        for name, result in comparison.results.items():
            if not result.is_correct:
                why = result.refusal or f"its error is {result.error:.3g} times what is allowed"
                sections.append(f" INCORRECT, not timed: {name} for {comparison.case}: {why}")
    return "\n\n".join(sections) + "\n"


def _cells(comparison: Comparison) -> list[str]:
    case, best = comparison.case, comparison.best_config
    dtype = str(case.dtype).removeprefix("torch.")
    cells = [str(case), dtype, _ms(comparison, "library"), _ms(comparison, "gemm")]
    cells += [_number(comparison.ratio("gemm")), comparison.computed_by]
    library = comparison.results["library"].seconds.get("graph")
    cells.append(f"{2 * case.M * case.N * case.K / median(library) / 1e12:.0f}" if library else "-")
    return cells + ([best, _ms(comparison, best), _number(comparison.ratio(best))] if best else ["-"] * 3)


def _ms(comparison: Comparison, name: str) -> str:
    """Return the median and the range of a candidate's rounds of graphs."""
    seconds = comparison.results[name].seconds
    if not seconds:
        return "INCORRECT"
    milliseconds = [1e3 * value for value in seconds["graph"]]
    return f"{median(milliseconds):.3f} ({min(milliseconds):.3f}..{max(milliseconds):.3f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
