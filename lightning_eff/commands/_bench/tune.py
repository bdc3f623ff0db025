"""Measure the GEMMs of a recipe's own layers, and keep who computes each: `bench --tune RECIPE`.

The GEMMs with the most FLOPs in a step come first, a choice is kept as soon as it is made, and what has one
is not measured again, so that a call that runs out of time has done what matters most and another continues.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lightning_eff.commands._bench import compile_ahead, gemm_timing
from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.commands._bench.gemm_timing import Comparison, fastest_by_bucket
from lightning_eff.commands._bench.recipe_gemms import (
    TRITON_GEMM,
    LayerProduct,
    case_counts,
    flops,
    layer_products,
)
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK
from lightning_eff.core.text import text_table
from lightning_eff.kernels import choices, dispatch
from lightning_eff.kernels.choices import LIBRARY, Choice
from lightning_eff.kernels.tile_configs import CONFIGS

FILE = "tune.json"
MINUTES = 8.0
ROUND_MS = 20
COMPILE_SHARE = 0.25
"""Part of the time in which kernels may be compiled ahead."""
NOTHING = f"nothing to measure: every GEMM has a choice or is below {dispatch.MIN_FLOP:.0e} FLOP\n"
HEADER = ("layers", "product", "M x N x K", "per step", "computed by", "library ms", "gain ms per step")
Measure = Callable[[Case], Comparison]
Save = Callable[[Mapping[str, Choice]], None]


@dataclass(kw_only=True)
class Tuned:
    """What is known of a recipe's GEMMs."""

    buckets: dict[Case, str]
    """Under which dispatch keeps the choice for each GEMM, that with the most FLOPs in a step first."""
    choices: dict[str, Choice]
    """By bucket; also those of earlier calls."""
    comparisons: dict[Case, Comparison] = field(default_factory=dict[Case, Comparison])
    """What this call has measured."""

    @classmethod
    def of(cls, products: Sequence[LayerProduct], device: torch.device, kept: Mapping[str, Choice]) -> Tuned:
        """Return what is known before anything is measured: the choices that were kept."""
        counts = case_counts(products)
        buckets = {case: choices.bucket(Problem.empty(case, device).shape()) for case in counts}
        known = (LIBRARY, *map(str, CONFIGS))
        wanted = {bucket: kept[bucket] for bucket in buckets.values() if bucket in kept}
        return cls(
            buckets=buckets,
            choices={bucket: choice for bucket, choice in wanted.items() if choice.config in known},
        )

    @property
    def missing(self) -> list[Case]:
        """GEMMs without a choice; those that are always the library's need none."""
        return [
            case
            for case, bucket in self.buckets.items()
            if bucket not in self.choices and flops(case) >= dispatch.MIN_FLOP
        ]

    def choice(self, case: Case) -> str:
        """Return a config or `torch`; empty where nothing was measured."""
        if flops(case) < dispatch.MIN_FLOP:
            return LIBRARY
        choice = self.choices.get(self.buckets[case])
        return choice.config if choice is not None else ""

    def choose(self, measure: Measure, save: Save, end: float) -> None:
        """Measure what is missing until `end` (of `time.monotonic`), and save each choice."""
        members: defaultdict[str, list[Case]] = defaultdict(list)
        for case in self.missing:
            members[self.buckets[case]].append(case)
        for cases in members.values():  # one choice for all that dispatch cannot distinguish
            if time.monotonic() >= end:
                return
            compared = {case: measure(case) for case in cases}
            chosen = fastest_by_bucket(compared.values())
            self.comparisons |= compared
            self.choices |= chosen
            save(chosen)

    def gain_s(self, case: Case) -> float | None:
        """Return the seconds that a choice saves per call, measured now or earlier; None without one."""
        name = self.choice(case)
        if not name or name == LIBRARY:
            return 0.0 if name else None
        comparison = self.comparisons.get(case)
        return comparison.saved_s(name) if comparison else self.choices[self.buckets[case]].saved_s


def main(options: argparse.Namespace, device: torch.device, environment: dict[str, Any]) -> int:
    """Run `bench --tune RECIPE`."""
    end = time.monotonic() + 60 * (options.minutes or MINUTES)
    products = layer_products(_values(options), is_cuda=device.type == "cuda")
    tuned = Tuned.of(products, device, {} if options.again else choices.of(device))
    jobs = compile_ahead.jobs_of(tuned.missing, device)
    sys.stderr.write(f"compiling {len(jobs)} kernels\n" if jobs else NOTHING)
    compile_ahead.compile_ahead(jobs, device, limit_s=COMPILE_SHARE * (end - time.monotonic()))

    def measure(case: Case) -> Comparison:
        sys.stderr.write(f"{list(tuned.buckets).index(case) + 1}/{len(tuned.buckets)} {case}\n")
        return gemm_timing.compare(case, device, round_ms=ROUND_MS, every_config=True)

    def content() -> str:
        raw = {"environment": environment, "recipe": options.recipe} | as_dict(products, tuned)
        return json.dumps(raw, indent=1) + "\n"

    def save(chosen: Mapping[str, Choice]) -> None:
        choices.save(device, chosen)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / FILE).write_text(content(), encoding="utf-8")

    tuned.choose(measure, save, end)
    sys.stdout.write(content() if options.json else report(products, tuned))
    results = [each for comparison in tuned.comparisons.values() for each in comparison.results.values()]
    return EXIT_OK if all(result.is_correct for result in results) else EXIT_FAILED


def _values(options: argparse.Namespace) -> dict[str, Any]:
    """Return the composed recipe with `callbacks/triton_gemm`, whose layers are measured."""
    path = RecipePath.of(options.config_dir)
    values = compose_recipe(options.recipe, options.overrides, path).values
    if TRITON_GEMM not in (values.get("callbacks") or {}):
        overrides = [*options.overrides, f"+callbacks={TRITON_GEMM}"]
        values = compose_recipe(options.recipe, overrides, path).values
    return values


def table_rows(products: Sequence[LayerProduct], tuned: Tuned) -> list[list[str]]:
    """Return a row for each product of each kind of layer: layers whose names differ by numbers are one."""
    counts: Counter[tuple[str, str, Case]] = Counter()
    names: defaultdict[str, set[str]] = defaultdict(set)
    for each in products:
        kind = re.sub(r"\d+", "*", each.layer)
        names[kind].add(each.layer)
        counts[kind, each.product, each.case] += each.count
    rows: list[list[str]] = []
    for (kind, product, case), count in counts.items():
        layer = f"{kind} ({len(names[kind])})" if len(names[kind]) > 1 else next(iter(names[kind]))
        comparison, gain = tuned.comparisons.get(case), tuned.gain_s(case)
        seconds = comparison.library_s if comparison is not None else None
        rows.append([
            layer, product, str(case), str(count), _by(case, tuned), _ms(seconds),
            _ms(gain * count if gain is not None else None),
        ])  # fmt: skip
    return rows


def _by(case: Case, tuned: Tuned) -> str:
    if flops(case) < dispatch.MIN_FLOP:
        return f"torch's library: below {dispatch.MIN_FLOP:.0e} FLOP"
    choice = tuned.choice(case)
    if not choice:
        return "torch's library: not measured, no time left"
    return "torch's library" if choice == LIBRARY else choice


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def gain_ms(products: Sequence[LayerProduct], tuned: Tuned) -> tuple[float, float]:
    """Return the milliseconds per step that choices save, and the library's of what this call measured."""
    counts = case_counts(products)
    saved = sum(count * (tuned.gain_s(case) or 0.0) for case, count in counts.items())
    library = sum(counts[case] * comparison.library_s for case, comparison in tuned.comparisons.items())
    return 1e3 * saved, 1e3 * library


def report(products: Sequence[LayerProduct], tuned: Tuned) -> str:
    """Return the table of layers, and the gain per step."""
    saved, library = gain_ms(products, tuned)
    measured, missing = len(tuned.comparisons), len(tuned.missing)
    earlier = sum(flops(case) >= dispatch.MIN_FLOP for case in tuned.buckets) - measured - missing
    lines = [text_table(HEADER, table_rows(products, tuned)), ""]
    lines.append(f" the choices save {saved:.2f} ms per step")
    lines.append(f" {measured} GEMMs measured, which take torch's library {library:.2f} ms per step")
    lines += [f" {earlier} chosen by an earlier call: --again measures them too"] if earlier else []
    lines += [f" {missing} not measured: the same command continues"] if missing else []
    return "\n".join(lines) + "\n"


def as_dict(products: Sequence[LayerProduct], tuned: Tuned) -> dict[str, Any]:
    """Return plain types."""
    rows = [
        asdict(each) | {"case": str(each.case), "computed_by": tuned.choice(each.case) or None}
        for each in products
    ]
    saved, library = gain_ms(products, tuned)
    return {
        "rows": rows, "saved_ms_per_step": saved, "library_ms_per_step": library,
        "missing": [str(case) for case in tuned.missing],
        "comparisons": [comparison.as_dict() for comparison in tuned.comparisons.values()],
    }  # fmt: skip
