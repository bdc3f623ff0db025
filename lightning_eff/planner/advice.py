"""Advise which techniques lower a step's peak, how much memory they save and how many FLOPs they cost.

`plan --advice`, `tune` and `out_of_memory.py` call `advise`. For each technique, `advise` predicts the step
again, because the position of the peak depends on the model. Candidates are the overrides that techniques
state (`core.technique.Try`). A candidate that conflicts with the recipe is listed with the reason. If a batch
does not fit, smaller micro-batches are tried first, because they leave the training unchanged. Then
candidates are added until the step fits, and each time the candidate that saves most is chosen. Every
addition moves the peak, so each candidate is predicted on top of the candidates already chosen.
"""

from __future__ import annotations

import functools
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_eff.core import catalog, rules
from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.technique import MEMORY, ways_to_try
from lightning_eff.planner.forecast import DeviceMemory, ExampleBatch, MemoryForecast, forecast
from lightning_eff.report.meter import samples_and_tokens
from lightning_eff.run import build_trainer

Options = tuple[str, ...]
"""Overrides that switch on a technique, written as on the command line."""
Compose = Callable[[Sequence[str]], Mapping[str, Any]]
"""Function that composes the recipe with further overrides."""
TRIED_MICRO_BATCHES = 8
"""Maximum number of micro-batches per batch to try; a prediction takes longer with more micro-batches."""
MIN_SAVING = 0.01
"""Fraction of the peak that a technique must save to be worth its cost."""
MIN_HALVING = 0.03
"""Fraction of the peak that halving a micro-batch must save; otherwise no smaller micro-batch is tried."""
PART = "{part}"
"""Placeholder for the micro-batch size in the overrides of a technique that splits batches."""


@dataclass(frozen=True)
class Candidate:
    """A technique that may lower the memory of a step: a `technique.Try` with its overrides."""

    words: Options
    needs: frozenset[str] = frozenset()
    """Facts of the run without which the technique saves nothing."""
    note: str = ""
    """How the technique changes the training; empty if the training stays the same."""
    is_chosen: bool = True
    """Whether the technique may be chosen to make a recipe fit; if False, its saving is just listed."""

    @property
    def divides(self) -> bool:
        """Whether the technique splits batches into micro-batches of a chosen size."""
        return PART in self.words[-1] and not self.needs


def candidates() -> list[Candidate]:
    """Return the candidates of all techniques that lower memory."""
    return [
        Candidate(
            (catalog.use_of(way.option), *way.overrides),
            needs=frozenset(way.needs),
            note=way.changes,
            is_chosen=way.is_advised,
        )
        for technique, way in ways_to_try()
        if not set(MEMORY).isdisjoint(technique.lowers)
    ]


@dataclass(frozen=True)
class Saving:
    """Effect of a candidate on a step."""

    words: Options
    saved_bytes: int | None = None
    """Bytes saved at the peak; None if the step cannot be predicted with the candidate."""
    peak_bytes: int | None = None
    """Peak with the candidate."""
    flops_ratio: float | None = None
    """FLOPs of a batch with the candidate, divided by the FLOPs without it; None if not counted."""
    why: str = ""
    """Why the candidate cannot be switched on, or the phase of the new peak."""


@dataclass(frozen=True)
class Advice:
    """Result of the search for techniques that lower the peak.

    Args:
        alone: Saving of each candidate by itself, the largest first.
        chosen: Candidates to add, in order, if the batch does not fit.
        overrides: Overrides of the chosen candidates. Empty if the batch fits without candidates, or does not
            fit even with all candidates.
        peak_bytes: Peak with the chosen candidates.
        fits: Whether the unchanged step fits.
        unfinished: Whether the time limit ended the search.
        reason: Why there is no advice.
    """

    alone: list[Saving] = field(default_factory=list[Saving])
    chosen: list[Saving] = field(default_factory=list[Saving])
    overrides: Options = ()
    peak_bytes: int | None = None
    fits: bool = True
    unfinished: bool = False
    reason: str = ""


@dataclass(frozen=True)
class AdvisedRecipe:
    """A composed recipe with a batch of its data; each set of overrides is predicted just once."""

    compose: Compose
    values: Mapping[str, Any]
    """The recipe without further overrides."""
    memory: DeviceMemory
    example: ExampleBatch
    _known: dict[Options, MemoryForecast] = field(default_factory=dict[Options, MemoryForecast])

    @classmethod
    def of(cls, compose: Compose, values: Mapping[str, Any], memory: DeviceMemory) -> AdvisedRecipe:
        """Load a batch of a composed recipe; raise any error of its data."""
        # A data module may print, for example while downloading; stdout is for the verb's JSON.
        with redirect_stdout(sys.stderr):
            return cls(compose, values, memory, ExampleBatch.of(values))

    def forecast(self, options: Options) -> MemoryForecast:
        """Compose with further overrides and predict the step; raise the errors that `train` would raise."""
        # A prediction takes seconds, and the search asks for the same overrides more than once.
        if options not in self._known:
            values = self.compose(options) if options else self.values
            rules.raise_rejected(rules.verdict_on(build_trainer(values)))
            self._known[options] = forecast(values, self.memory, self.example)
        return self._known[options]

    def saving(self, before: Options, candidate: Candidate) -> Saving:
        """Predict the step with a candidate on top of the options `before`."""
        words, now = candidate.words, self.forecast(before)
        try:
            then = self.forecast((*before, *words))
        except PRE_RUN_ERRORS as error:
            return Saving(words, why=str(error).splitlines()[0])
        if then.num_bytes is None or now.num_bytes is None or then.peak is None:
            return Saving(words, why=f"not predicted: {then.prediction.reason}")
        saved, flops = now.num_bytes - then.num_bytes, now.prediction.flops
        why = f"new peak: {then.peak.phase}"
        if saved < MIN_SAVING * now.num_bytes:
            why = "saves < 1 %" if saved > 0 else "saves nothing here"
        why = f"{candidate.note}; {why}" if candidate.note else why
        return Saving(words, saved, then.num_bytes, then.prediction.flops / flops if flops else None, why)

    def is_on(self, word: str) -> bool:
        """Return whether an override adds a callback that the recipe already has."""
        return word.removeprefix("+callbacks=") in (self.values.get("callbacks") or {})

    def micro_batches(self) -> Iterator[Candidate]:
        """Yield candidates with half the current micro-batch size, a quarter of it, and so on."""
        samples = self.example.batch_size or samples_and_tokens(self.example.batch)[0]
        for candidate in candidates():
            if not candidate.divides:
                continue
            *added, last = candidate.words
            # If the recipe already has the technique, halve the size that the recipe sets.
            size: Any = samples
            if any(map(self.is_on, added)):
                path = last.partition("=")[0].split(".")
                size, added = functools.reduce(operator.getitem, path, self.values), []
            # With the size `auto`, the run itself halves micro-batches, so nothing is left to try.
            size = min(size, samples) if isinstance(size, int) else 1
            # size / 2, size / 4, ..., 1.
            for power in range(1, size.bit_length()):
                yield replace(candidate, words=(*added, last.replace(PART, str(size >> power))))

    def alone(self, before: Options, until: float, *, shows_all: bool = True) -> list[Saving]:
        """Return the savings of each candidate on top of the options `before`, the largest first.

        Args:
            before: Overrides that are already chosen; candidates that conflict with one of them are skipped.
            until: Time of the monotonic clock after which no prediction starts.
            shows_all: Whether to include candidates that may not be chosen.
        """
        # A candidate that splits batches is listed once, with the smallest micro-batch that is tried.
        part = max(1, (self.example.batch_size or 1) // TRIED_MICRO_BATCHES)
        peak = self.forecast(before).peak
        facts = {f"peak/{holder.operation}" for holder in peak.holders} if peak is not None else set[str]()
        facts |= {"run/cuda"} if self.memory.is_cuda else set()
        found: list[Saving] = []
        for each in candidates():
            is_asked_for = each.needs <= facts and (shows_all or each.is_chosen)
            # Skip a candidate that the recipe already has, or that conflicts with a chosen override.
            is_new = not all(map(self.is_on, each.words))
            is_new &= not any(mutually_exclusive(each.words[0], word) for word in before)
            if is_asked_for and is_new and time.monotonic() < until:
                words = tuple(word.replace(PART, str(part)) for word in each.words)
                found.append(self.saving(before, replace(each, words=words)))
        return sorted(found, key=lambda saving: -(saving.saved_bytes or 0))


def mutually_exclusive(first: str, second: str) -> bool:
    """Return whether two overrides set the same technique or group, so that they cannot be combined.

    Example:
        >>> mutually_exclusive("precision=bf16_mixed", "precision=bf16_true")
        True
        >>> mutually_exclusive("+callbacks=micro_batch", "+callbacks=gradient_checkpointing")
        False
    """
    # An added callback (`+callbacks=x`) is compared in full, but a group only by its name.
    names = [word if word.startswith("+") else word.split("=")[0] for word in (first, second)]
    return names[0] == names[1]


def advise(
    recipe: AdvisedRecipe,
    *,
    usable_bytes: int | None = None,
    budget_s: float = 60.0,
    shows_alone: bool = True,
) -> Advice:
    """Choose techniques to add until the step fits; optionally predict each candidate alone as well.

    Args:
        recipe: The recipe to advise on.
        usable_bytes: Bytes that the step may use; None means the device's free bytes.
        budget_s: Seconds after which no further prediction starts.
        shows_alone: Whether to predict each candidate alone.
    """
    until = time.monotonic() + budget_s
    now = recipe.forecast(())
    if now.num_bytes is None:
        return Advice(reason=now.prediction.reason)
    usable_bytes = recipe.memory.free_bytes if usable_bytes is None else usable_bytes
    fits = now.num_bytes <= usable_bytes
    alone = recipe.alone((), until) if shows_alone else []
    chosen = [] if fits else _savings_until_it_fits(recipe, usable_bytes, until)
    peak_bytes = chosen[-1].peak_bytes if chosen else None
    # Overrides with which the step still does not fit are not recommended.
    is_enough = peak_bytes is not None and peak_bytes <= usable_bytes
    overrides = tuple(word for saving in chosen for word in saving.words) if is_enough else ()
    return Advice(alone, chosen, overrides, peak_bytes, fits, unfinished=time.monotonic() >= until)


def _savings_until_it_fits(recipe: AdvisedRecipe, usable_bytes: int, until: float) -> list[Saving]:
    """Return the savings of the techniques to add, in order, until the step fits or no technique helps."""
    peak_bytes = recipe.forecast(()).num_bytes or 0
    for candidate in recipe.micro_batches():
        if time.monotonic() >= until:
            break
        # Micro-batches come first: they change neither the gradient nor the number of FLOPs.
        half = recipe.saving((), candidate)
        if half.peak_bytes is None or half.peak_bytes > (1 - MIN_HALVING) * peak_bytes:
            break
        if half.peak_bytes <= usable_bytes:
            return [half]
        peak_bytes = half.peak_bytes
    # Greedy search: in each pass, add the technique that saves most on top of the chosen techniques.
    chosen: list[Saving] = []
    while not chosen or (chosen[-1].peak_bytes or 0) > usable_bytes:
        options = tuple(word for saving in chosen for word in saving.words)
        best = next(iter(recipe.alone(options, until, shows_all=False)), None)
        if best is None or not best.saved_bytes or best.saved_bytes < 0:
            break
        chosen.append(best)
    return chosen
