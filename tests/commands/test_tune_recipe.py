"""`tune`: it finds the fastest combination that fits, and never proposes one that does not."""

from __future__ import annotations

import functools
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_eff.commands import tune
from lightning_eff.commands.tune import UNCHANGED, Search, fingerprint, name_of
from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import FAILED, MEASURED, NO_EFFECT, TrialResult
from lightning_eff.comparison.rounds import Trial, TrialRounds
from lightning_eff.comparison.trial_plan import Change
from lightning_eff.core.errors import EXIT_OK, EXIT_OUT_OF_MEMORY, ConflictError, UsageError
from lightning_eff.planner.advice import Advice, AdvisedRecipe
from lightning_eff.planner.forecast import DeviceMemory
from tests.support.command_line import Command

MIB = 2**20
EFFECTS = {  # of speed and of memory, by a word
    "+callbacks=torch_compile": (1.5, 1.0),
    "precision=auto": (1.3, 0.7),
    "+callbacks=channels_last": (0.9, 1.0),
    "data.batch_size=4": (0.8, 0.5),
    "data.batch_size=16": (1.1, 1.9),
}
CHANGES: list[Change] = [(word,) for word in EFFECTS]


class World:
    """Trials and predictions of a recipe whose speed and memory are products of `EFFECTS`."""

    def __init__(self, folder: Path, *, limit: float = 1e9, lies: float = 1.0, clash: Change = ()) -> None:
        self.trials: list[Change] = []
        self.lies, self.clash = lies, clash
        memory = DeviceMemory("here", int(limit * MIB))
        recipe: Any = SimpleNamespace(forecast=self.forecast, memory=memory)
        rounds = TrialRounds(folder, 60.0, kept=folder / "results")
        self.search = Search(recipe, rounds, self.trial)

    def figures(self, change: Change) -> tuple[float, int]:
        rate, peak = 100.0, 100.0 * MIB
        for word in change:
            rate, peak = rate * EFFECTS[word][0], peak * EFFECTS[word][1]
        return rate, round(peak)

    def forecast(self, change: Change) -> Any:
        if len(self.clash) > 1 and set(self.clash) <= set(change):
            text = "these two exclude each other"
            raise ConflictError(text)
        return SimpleNamespace(num_bytes=round(self.figures(change)[1] / self.lies))

    def trial(self, change: Change) -> Trial:
        return Trial(name_of(change), list(change), functools.partial(self.answer, change))

    def answer(self, change: Change, _: Path) -> Any:
        self.trials.append(change)
        return self.train(change)

    def train(self, change: Change) -> TrialResult:
        rate, peak = self.figures(change)
        return TrialResult(MEASURED, report={"measured": {"samples_per_s": rate, "peak_bytes": peak}})

    def left_out(self) -> dict[str, str]:
        return {row.technique: text for row in self.search.rows() if (text := row.reason or row.excluded)}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(train: Callable[[Path], TrialResult], *, folder: Path, limit_s: float) -> TrialResult:
        return train(folder)

    monkeypatch.setattr(subprocess_trial, "run", run)


def fits(change: Sequence[str], world: World, limit: float) -> bool:
    return world.figures(tuple(change))[1] <= limit * MIB


def test_it_finds_the_best_of_all_combinations(tmp_path: Path) -> None:
    world = World(tmp_path)
    best = world.search.run(CHANGES)
    assert set(best) == {"+callbacks=torch_compile", "precision=auto", "data.batch_size=16"}
    counts = Counter(world.trials)
    assert counts[UNCHANGED] == 5, "twice before the first round, and in each"
    assert counts[best] == 3, "the last ones are measured again"
    assert counts["data.batch_size=4",] == 1, "the slow ones are not"


@pytest.mark.parametrize("lies", [1.0, 3.0], ids=["predicted", "only measured"])
def test_it_never_proposes_a_combination_that_does_not_fit(tmp_path: Path, lies: float) -> None:
    """With 50 limits, also where the prediction is a third of the truth."""
    draw = random.Random(0)
    for number in range(50):
        limit = draw.uniform(90, 220)
        world = World(tmp_path / str(number), limit=limit, lies=lies)
        if limit < 100:
            with pytest.raises(UsageError, match=r"the recipe itself fails: (predicted|measured) peak 100"):
                world.search.run(CHANGES)
            continue
        assert fits(world.search.run(CHANGES), world, limit)
        if lies == 1.0:
            assert all(fits(change, world, limit) for change in world.trials), "not even tried"


def test_a_combination_that_the_rules_reject_has_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path, clash=("+callbacks=torch_compile", "precision=auto"))
    best = world.search.run(CHANGES)
    assert set(best) == {"+callbacks=torch_compile", "data.batch_size=16"}
    reasons = [reason for name, reason in world.left_out().items() if "precision=auto" in name]
    assert reasons == ["these two exclude each other"] * 2


def test_it_continues_where_it_stopped(tmp_path: Path) -> None:
    first = World(tmp_path)
    train, calls = first.train, itertools.count()

    def killed(change: Change) -> TrialResult:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return train(change)

    first.train = killed
    with pytest.raises(KeyboardInterrupt):
        first.search.run(CHANGES)
    second, whole = World(tmp_path), World(tmp_path / "whole")
    assert second.search.run(CHANGES) == whole.search.run(CHANGES)
    done = Counter(first.trials[:-1]) + Counter(second.trials)
    assert done == Counter(whole.trials), "nothing is measured more often"


def test_the_recipe_stays_unchanged_if_nothing_is_faster_or_there_is_no_time(tmp_path: Path) -> None:
    assert World(tmp_path).search.run([("+callbacks=channels_last",)]) == UNCHANGED
    late = World(tmp_path / "late")
    late.search.rounds.until = time.monotonic()
    assert late.search.run(CHANGES) == UNCHANGED
    assert late.trials == []


def test_a_change_that_fails_or_has_no_known_memory_is_left_out(tmp_path: Path) -> None:
    """`precision=auto` fails, and the peak of the smaller batch is neither predicted nor measured."""
    world = World(tmp_path)
    forecast, train = world.forecast, world.train

    def trial(change: Change) -> TrialResult:
        found = train(change)
        if "precision=auto" in change:
            return TrialResult(FAILED, "out of memory")
        return TrialResult(MEASURED, report={"measured": found.report["measured"] | {"peak_bytes": None}})

    def unknown(change: Change) -> Any:
        return SimpleNamespace(num_bytes=None) if "data.batch_size=4" in change else forecast(change)

    world.search.recipe = SimpleNamespace(forecast=unknown, memory=world.search.recipe.memory)  # pyright: ignore[reportAttributeAccessIssue]
    world.train = trial
    assert set(world.search.run(CHANGES)) == {"+callbacks=torch_compile", "data.batch_size=16"}
    assert world.left_out() == {
        "precision=auto": "out of memory",
        "data.batch_size=4": "its memory is neither predicted nor measured",
    }
    assert world.trials.count(("precision=auto",)) == 1


def test_results_of_other_settings_memory_base_or_length_are_not_used() -> None:
    def name(size: int = 1, base: Change = (), limit_s: float = 9.0, steps: int = 8, **data: int) -> str:
        return fingerprint({"data": data}, DeviceMemory("here", size), base, limit_s, steps)

    others = {name(size=2), name(base=CHANGES[0]), name(limit_s=8.0), name(steps=9), name(batch_size=3)}
    assert name() == name() not in others
    assert len(others) == 5


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measure nothing: each trial is as fast as its command is long; return the commands."""
    commands: list[list[str]] = []

    def run(train: functools.partial[int], *, folder: Path, limit_s: float) -> TrialResult:
        del folder, limit_s
        commands.append(train.args[0])
        figures = {"samples_per_s": float(len(" ".join(train.args[0]))), "peak_bytes": MIB}
        is_added = "+callbacks=channels_last" in train.args[0]
        ledger = [{"technique": "callbacks/channels_last", "status": "no effect"}] * is_added
        return TrialResult(MEASURED, report={"measured": figures, "ledger": ledger})

    monkeypatch.setattr(subprocess_trial, "run", run)
    monkeypatch.setattr(AdvisedRecipe, "forecast", lambda *_: SimpleNamespace(num_bytes=MIB, peak=None))
    monkeypatch.setattr(tune, "advise", lambda *_, **__: Advice())
    return commands


def test_the_last_line_is_the_command_and_a_second_call_measures_nothing(
    command: Command, tiny: list[str], trials: list[list[str]]
) -> None:
    words = ("tune", "lm", *tiny, "data.batch_size=4", "+callbacks=torch_compile", "--minutes", "2")
    out = command(*words, code=EXIT_OK)[1]
    last = out.splitlines()[-1]
    assert last.startswith("lightning-eff train lm ")
    assert "+callbacks=" in last
    assert all("trainer.max_steps=8" in words for words in trials)
    typed = [[word for word in each if word.startswith("data.batch_size=")] for each in trials]
    assert {each[-1] for each in typed} == {"data.batch_size=4"}, "the user's setting stays"
    assert not any("~callbacks.torch_compile" in each for each in trials)
    assert any("~callbacks.tiled_loss" in each for each in trials)
    number = len(trials)
    assert number > 3
    found = json.loads(command(*words, "--json", code=EXIT_OK)[1])
    assert len(trials) == number
    assert last.endswith(" ".join(found["overrides"]))
    excluded = {row["technique"]: row["excluded"] for row in found["rows"]}
    assert excluded["+callbacks=channels_last"] == NO_EFFECT


def test_a_limit_that_nothing_fits_is_an_error(
    command: Command, tiny: list[str], trials: list[list[str]]
) -> None:
    words = ["--memory", "10KiB", "--minutes", "0.2"]
    err = command("tune", "lm", *tiny, *words, code=EXIT_OUT_OF_MEMORY)[2]
    assert "no combination fits in 10.0 KiB of CPU (--memory)" in err
    assert trials == []
