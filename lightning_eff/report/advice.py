"""Suggest techniques that would reduce a run's peak memory or its time.

`EfficiencyReport` calls `advise` at the end of a fit. A technique may have a static method `suggest`.
`suggest` receives the allocations of a run's first steps (`Observed`). `suggest` returns a `Suggestion`, or
None if the technique would not help. To predict the saving, `suggest` replays the recorded allocations
without the allocations that the technique avoids. `advise` omits techniques that the rules reject in this
run, and techniques that the run already used. Savings of time are not predicted. A technique that saves time
is suggested if the step spends a large part of its time in operations that the technique speeds up
(`Observed.time_share`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import AdamW

from lightning_eff.core import catalog, rules
from lightning_eff.core.errors import Remedy, root_cause_line
from lightning_eff.core.technique import Verdict, name_of, non_default_config
from lightning_eff.report.attention import AttentionRow
from lightning_eff.report.module_tracker import BACKWARD, STEP
from lightning_eff.report.recording import ACTIVATIONS, TEMPORARIES, Allocation, Recorder

MIN_SAVING = 0.05
"""Minimum saving of a suggestion, as a fraction of the peak."""
MIN_TIME = 0.3
"""Minimum fraction of the step time. If a kind of operation takes less, no technique for it is suggested."""
SMALL_OPERATION_S = 20e-6
"""Seconds. If operations take less on average, launching an operation takes as long as computing it."""
MAX_SUGGESTIONS = 5


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A technique or a code change that would reduce a run's memory or time.

    Args:
        technique: A configured instance, or an optimizer class; None if the suggestion is a code change.
        why: The tensors or operations that the technique acts on, for example the largest tensors at the
            peak.
        peak_bytes: Predicted peak with the technique; None if the technique saves time.
        change: The code change for the user to make.
    """

    technique: object = None
    why: str
    peak_bytes: int | None = None
    change: str = ""

    @property
    def remedy(self) -> str:
        """Text for the user to paste: an override, a code change, or Python code if no recipe is running."""
        if self.technique is None:
            return self.change
        name = name_of(self.technique)
        added, path = catalog.use_of(name), name.replace("/", ".")
        if isinstance(self.technique, type):
            python = f"callbacks=[OptimizerChoice(optimizer=partial({self.technique.__name__}, lr=...))]"
            return str(Remedy(added, python))
        options = non_default_config(self.technique)
        words = [added, *(f"{path}.{key}={value}" for key, value in options.items())]
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        python = f"{type(self.technique).__name__}({arguments})"
        argument = "plugins" if isinstance(self.technique, Precision) else "callbacks"
        python = f"{argument}=[{python}]"
        return str(Remedy(" ".join(words), python))


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Measurements of a run, which the method `suggest` of each technique receives.

    Args:
        trainer: Trainer of the run, at the end of `fit`.
        recorder: Record of the first steps; None if live bytes were not counted (on a GPU).
        measured: Figures of the report, as `Meter.summary` returns them.
        sample: A few samples of the first batch, as a smaller batch; None if the batch cannot be split.
        num_samples: Number of samples in the first batch.
        num_tokens: Number of tokens in the first batch; 0 if the batch has no tokens.
        attention: Attention calls of the first batch.
        time: Result of `StepTimes.summary`, with the time of each part of a step.
    """

    trainer: pl.Trainer
    recorder: Recorder | None
    measured: Mapping[str, Any]
    sample: Any = None
    num_samples: int = 0
    num_tokens: int = 0
    attention: Sequence[AttentionRow] = ()
    time: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def time_share(self, kind: str) -> float:
        """Return the fraction of a step's time in one kind of operation; 0 if operations were not timed."""
        return self.time.get("operations", {}).get(kind, 0.0)

    @property
    def small_operations(self) -> str:
        """Reason why larger micro-batches would be faster; empty if operations are large or not timed."""
        mean_s = self.time.get("operation_s") or SMALL_OPERATION_S
        text = f"{self.time.get('num_operations')} operations a batch take {1e6 * mean_s:.0f} us on average"
        return f"{text}: launching them takes as long" if mean_s < SMALL_OPERATION_S else ""

    @property
    def module(self) -> pl.LightningModule:
        """The trained module."""
        return self.trainer.lightning_module

    @property
    def allocations(self) -> Sequence[Allocation]:
        """Every storage of the first steps."""
        return () if self.recorder is None else self.recorder.allocations

    @cached_property
    def peak_bytes(self) -> int:
        """Maximum of live bytes; 0 if live bytes were not counted."""
        return self.peak_if({})

    @property
    def has_adamw(self) -> bool:
        """Whether the run uses torch's AdamW, and `OptimizerChoice` could replace this optimizer."""
        callbacks: Any = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        is_chosen = any(name_of(each) == "callbacks/optimizer_choice" for each in callbacks)
        # OptimizerChoice rejects a module that returns its own scheduler.
        is_free = self.module.automatic_optimization and not self.trainer.lr_scheduler_configs
        return [type(each) for each in self.trainer.optimizers] == [AdamW] and (is_chosen or is_free)

    def is_worth(self, peak_bytes: int) -> bool:
        """Return whether a predicted peak is lower than the recorded peak by at least `MIN_SAVING`."""
        return self.peak_bytes - peak_bytes >= MIN_SAVING * self.peak_bytes > 0

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Largest size in bytes of each allocation, by the allocation's index."""
        sizes: dict[int, int] = defaultdict(int)
        for event in () if self.recorder is None else self.recorder.events:
            sizes[event.allocation] = max(sizes[event.allocation], event.num_bytes)
        return sizes

    def activations(self) -> Iterator[tuple[int, Allocation]]:
        """Yield the index and the allocation of each activation and temporary outside the optimizer step."""
        for index, each in enumerate(self.allocations):
            if each.category in (ACTIVATIONS, TEMPORARIES) and each.operation and each.phase != STEP:
                yield index, each

    def step_temporaries(self) -> list[int]:
        """Return the indices of temporaries that the optimizer's step allocates and frees."""
        made = enumerate(self.allocations)
        return [index for index, each in made if each.category == TEMPORARIES and each.phase == STEP]

    def owners(self, modules: Collection[str]) -> list[str]:
        """Return, for each allocation, which of `modules` made the allocation (empty if none of them)."""

        @cache
        def owner_of(path: str) -> str:
            return next((name for name in modules if path == name or path.startswith(f"{name}.")), "")

        return [owner_of(each.path) for each in self.allocations]

    def peak_if(
        self, factors: Mapping[int, float], *, recomputed: Collection[str] = (), held_bytes: int = 0
    ) -> int:
        """Replay the allocations of the first steps with changed sizes, and return the peak in bytes.

        Args:
            factors: Factor on the size of an allocation, by the allocation's index; 1 by default.
            recomputed: Names of modules that would keep only their inputs and outputs. All other activations
                of these modules are dropped, and recomputed when the backward pass reaches the module.
            held_bytes: Bytes to add at every moment of the replay.
        """
        if self.recorder is None:
            return 0

        owners = self.owners(recomputed)
        # Outputs of blocks are kept, because the next block recomputes its activations from them.
        is_dropped = [
            bool(owner) and each.category == ACTIVATIONS and index not in self.recorder.block_outputs
            for index, (owner, each) in enumerate(zip(owners, self.allocations, strict=True))
        ]
        # Dropped bytes by (module, call) and allocation, until the backward pass recomputes them.
        pending: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        # Recomputed allocations that are still alive, by module.
        remade: dict[str, set[int]] = defaultdict(set)
        sizes: dict[int, float] = defaultdict(float)
        live = top = float(held_bytes)
        for event in self.recorder.events:
            index, size = event.allocation, event.num_bytes * factors.get(event.allocation, 1.0)
            owner, call = owners[index], self.allocations[index].block_call
            if is_dropped[index] and event.phase != BACKWARD and index not in sizes:
                pending[owner, call][index] = size
                continue
            if owner and event.phase == BACKWARD:
                if index not in pending[owner, call]:  # backward runs the latest pending call of the module
                    call = max(
                        (each for name, each in pending if name == owner and pending[name, each]), default=0
                    )
                # A module's first event in the backward pass restores all dropped tensors of that call.
                if index in pending[owner, call] or not remade[owner]:
                    made_again = pending.pop((owner, call), {})
                    sizes.update(made_again)
                    live += sum(made_again.values())
                    remade[owner] |= made_again.keys()
            # An event has the storage's new size, not the difference.
            live += size - sizes[index]
            sizes[index] = size
            # When no recomputed tensor is alive, the next event recomputes an earlier call.
            if not size:
                remade[owner].discard(index)
            top = max(top, live)
        return int(top)


def advise(run: Observed, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the suggestions for a run as plain values, the largest saving of memory first.

    Args:
        run: Measurements after the last step.
        rows: Rows of the ledger, one per technique of the run.
    """
    used = {row["technique"] for row in rows}
    components = rules.trainer_components(run.trainer)
    facts = rules.run_facts(run.trainer, run.module)
    # Findings about the run itself do not count against a suggestion.
    before = {str(each) for each in rules.check_rules(components, facts)}
    for_memory, for_time = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, technique in catalog.techniques_with("suggest").items():
        each: Suggestion | None = None
        try:
            each = technique.suggest(run)
        except Exception as error:  # noqa: BLE001 - it calls user code, and the run has ended well
            rank_zero_info(f"no advice by {name}: {root_cause_line(error)}")
        is_time = each is not None and each.peak_bytes is None
        if each is None or not (is_time or run.is_worth(each.peak_bytes or 0)):
            continue
        # Rules do not apply to a change of the user's code.
        added = () if each.technique is None else (each.technique,)
        # A run has exactly one precision, so a suggested precision replaces the run's precision.
        replaced = [
            one for one in components if isinstance(one, Precision) and isinstance(each.technique, Precision)
        ]
        findings = rules.check_rules([*(one for one in components if one not in replaced), *added], facts)
        new = [finding for finding in findings if str(finding) not in before]
        is_rejected = any(finding.rule.verdict == Verdict.REJECTED for finding in new)
        if is_rejected or any(name_of(one) in used for one in added if not replaced):
            continue
        notes = [f"{finding.found}: {finding.rule.reason}" for finding in new]
        saved_bytes = None if each.peak_bytes is None else run.peak_bytes - each.peak_bytes
        row = {"technique": name, "try": each.remedy, "saved_bytes": saved_bytes}
        (for_time if is_time else for_memory).append(row | {"why": "; ".join([each.why, *notes])})
    for_memory.sort(key=lambda row: -row["saved_bytes"])
    # All suggestions for time are shown; the remaining lines go to the largest savings of memory.
    return for_memory[: MAX_SUGGESTIONS - len(for_time)] + for_time
