"""`tune`: which changes it tries, that it finds the fastest that fits, and that it never proposes another."""

from __future__ import annotations

import functools
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_eff.commands import tune
from lightning_eff.commands.tune import (
    UNCHANGED,
    Results,
    Search,
    fingerprint,
    single_changes,
)
from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import CHANGES_LOSS, FAILED, MEASURED, NO_EFFECT, TrialResult
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core.errors import (
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    ConfigError,
    ConflictError,
    UsageError,
)
from lightning_eff.planner.advice import Advice, AdvisedRecipe, Options
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
CHANGES: list[Options] = [(word,) for word in EFFECTS]


class World:
    """Trials and predictions of a recipe whose speed and memory are products of `EFFECTS`."""

    def __init__(self, folder: Path, *, limit: float = 1e9, lies: float = 1.0, clash: Options = ()) -> None:
        self.trials: list[tuple[Options, int]] = []
        self.lies, self.clash = lies, clash
        memory = DeviceMemory("here", int(limit * MIB))
        recipe: Any = SimpleNamespace(forecast=self.forecast, memory=memory)
        until = time.monotonic() + 1000
        self.search = Search(recipe, Results(folder / "tune.json"), self.train, until)

    def figures(self, change: Options) -> tuple[float, int]:
        rate, peak = 100.0, 100.0 * MIB
        for word in change:
            rate, peak = rate * EFFECTS[word][0], peak * EFFECTS[word][1]
        return rate, round(peak)

    def forecast(self, change: Options) -> Any:
        if len(self.clash) > 1 and set(self.clash) <= set(change):
            text = "these two exclude each other"
            raise ConflictError(text)
        return SimpleNamespace(num_bytes=round(self.figures(change)[1] / self.lies))

    def train(self, change: Options, steps: int) -> TrialResult:
        self.trials.append((change, steps))
        rate, peak = self.figures(change)
        return TrialResult(MEASURED, report={"measured": {"samples_per_s": rate, "peak_bytes": peak}})


def fits(change: Sequence[str], world: World, limit: float) -> bool:
    return world.figures(tuple(change))[1] <= limit * MIB


def test_it_finds_the_best_of_all_combinations(tmp_path: Path) -> None:
    world = World(tmp_path)
    best, steps = world.search.run(CHANGES, 8)
    assert set(best) == {"+callbacks=torch_compile", "precision=auto", "data.batch_size=16"}
    assert steps > 8, "the last ones are measured again, for longer"
    tried = [change for change, number in world.trials if number == 8]
    assert len(tried) == len(set(tried)), "no trial runs twice"


@pytest.mark.parametrize("lies", [1.0, 3.0], ids=["predicted", "only measured"])
def test_it_never_proposes_what_does_not_fit(tmp_path: Path, lies: float) -> None:
    """50 limits, also where the prediction is a third of the truth: the best that fits, or nothing else."""
    draw = random.Random(0)
    for number in range(50):
        limit = draw.uniform(90, 220)
        world = World(tmp_path / str(number), limit=limit, lies=lies)
        if limit < 100:
            with pytest.raises(UsageError, match=r"the recipe itself fails: (predicted|measured) peak 100"):
                world.search.run(CHANGES, 8)
            continue
        best, _ = world.search.run(CHANGES, 8)
        assert fits(best, world, limit)
        if lies == 1.0:
            assert all(fits(change, world, limit) for change, _ in world.trials), "not even tried"


def test_what_the_rules_reject_is_left_out_with_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path, clash=("+callbacks=torch_compile", "precision=auto"))
    best, _ = world.search.run(CHANGES, 8)
    assert set(best) == {"+callbacks=torch_compile", "data.batch_size=16"}
    reasons = [reason for change, reason in world.search.left_out.items() if "precision=auto" in change]
    assert reasons == ["these two exclude each other"] * 2


def test_it_continues_where_it_stopped(tmp_path: Path) -> None:
    first = World(tmp_path)
    train, calls = first.search.train, itertools.count()

    def killed(change: Options, steps: int) -> TrialResult:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return train(change, steps)

    first.search.train = killed
    with pytest.raises(KeyboardInterrupt):
        first.search.run(CHANGES, 8)
    second = World(tmp_path)
    found = second.search.run(CHANGES, 8)
    assert not set(first.trials) & set(second.trials), "nothing is measured twice"
    assert found == World(tmp_path / "whole").search.run(CHANGES, 8)


def test_a_small_gain_or_no_time_leaves_the_recipe(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.search.run([("+callbacks=channels_last",)], 8)[0] == UNCHANGED
    late = World(tmp_path / "late")
    late.search.until = time.monotonic()
    assert late.search.run(CHANGES, 8)[0] == UNCHANGED
    assert (late.search.unfinished, late.trials) == (True, [])


def test_what_fails_or_has_no_known_memory_is_left_out(tmp_path: Path) -> None:
    """`auto` fails, and the peak of the smaller batch is neither predicted nor measured."""
    world = World(tmp_path)
    forecast, train = world.forecast, world.search.train

    def trial(change: Options, steps: int) -> TrialResult:
        found = train(change, steps)
        if "precision=auto" in change:
            return TrialResult(FAILED, "out of memory")
        return TrialResult(MEASURED, report={"measured": found.report["measured"] | {"peak_bytes": None}})

    def unknown(change: Options) -> Any:
        return SimpleNamespace(num_bytes=None) if "data.batch_size=4" in change else forecast(change)

    world.search.recipe = SimpleNamespace(forecast=unknown, memory=world.search.recipe.memory)  # pyright: ignore[reportAttributeAccessIssue]
    world.search.train = trial
    best, _ = world.search.run(CHANGES, 8)
    assert set(best) == {"+callbacks=torch_compile", "data.batch_size=16"}
    assert world.search.left_out == {
        ("precision=auto",): "out of memory",
        ("data.batch_size=4",): "its memory is neither predicted nor measured",
    }
    assert [change for change, _ in world.trials].count(("precision=auto",)) == 1


def test_a_recipe_whose_code_was_fixed_is_tried_again_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    broken = World(tmp_path)
    broken.search.train = lambda change, steps: TrialResult(FAILED, "a bug")
    with pytest.raises(UsageError, match="the recipe itself fails: a bug"):
        broken.search.run(CHANGES, 8)
    assert "precision=auto" in World(tmp_path).search.run(CHANGES, 8)[0]
    for content in ('{"a": ', "[]", '{"": {"8": {"state": 1}}}'):
        (tmp_path / "tune.json").write_text(content)
        with pytest.raises(ConfigError, match="damaged"):
            World(tmp_path)


def test_results_are_kept_apart_by_settings_memory_what_makes_the_recipe_fit_and_time() -> None:
    values = compose_recipe("lm", []).values
    other = values | {"data": values["data"] | {"batch_size": 3}}
    names = [
        fingerprint(settings, DeviceMemory("here", size), base, limit_s)
        for settings, size, base, limit_s in (
            (values, 1, (), 9.0), (values, 2, (), 9.0), (values, 1, ("+callbacks=tiled_conv",), 9.0),
            (values, 1, (), 8.0), (other, 1, (), 9.0), (values, 1, (), 9.0),
        )
    ]  # fmt: skip
    assert (len(set(names)), names[0]) == (5, names[5])


def test_a_change_that_promises_the_same_loss_and_has_another_is_not_proposed(tmp_path: Path) -> None:
    """The compiler, which is the fastest, has another loss; `auto` may; the results are read again."""
    world = World(tmp_path)
    train = world.search.train

    def trial(change: Options, steps: int) -> TrialResult:
        is_compiled = "+callbacks=torch_compile" in change
        ledger = [{"technique": "callbacks/torch_compile", "status": "applied", "exact": True}] * is_compiled
        more = {"losses": [(1, 2.1 if change else 2.0)], "ledger": ledger, "precision": "32-true"}
        return TrialResult(MEASURED, report={**train(change, steps).report, **more})

    world.search.train = trial
    for _ in range(2):
        best, _ = world.search.run(CHANGES, 8)
        assert set(best) == {"precision=auto", "data.batch_size=16"}
        assert world.search.left_out == {("+callbacks=torch_compile",): CHANGES_LOSS}
        world.search = World(tmp_path).search


def test_changes_keep_the_global_batch() -> None:
    words = [" ".join(each) for each in single_changes(compose_recipe("lm", []).values, has_batch_norm=False)]
    assert "data.batch_size=8" in words
    assert "data.batch_size=16" not in words, "it has that"
    assert "~callbacks.tiled_loss" in words
    assert not any("micro_batch" in word or "global_batch" in word for word in words)
    values = compose_recipe("images", []).values
    images = [" ".join(each) for each in single_changes(values, has_batch_norm=False)]
    assert not any(word.startswith("data.batch_size") for word in images), "there the batch is the loader's"
    assert sum("micro_batch_size=" in word for word in images) == 2
    normed = [" ".join(each) for each in single_changes(values, has_batch_norm=True)]
    assert set(images) - set(normed) == {word for word in images if "micro_batch" in word}


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
    monkeypatch.setattr(AdvisedRecipe, "forecast", lambda *_: SimpleNamespace(num_bytes=MIB))
    monkeypatch.setattr(tune, "advise", lambda *_, **__: Advice())
    return commands


def test_the_last_line_is_the_command_and_a_second_call_measures_nothing(
    command: Command, tiny: list[str], trials: list[list[str]]
) -> None:
    words = ("tune", "lm", *tiny, "data.batch_size=4", "--minutes", "2")
    code, out, err = command(*words)
    assert code == EXIT_OK, err
    last = out.splitlines()[-1]
    assert last.startswith("lightning-eff train lm ")
    assert "+callbacks=" in last
    assert "times the recipe, peak 1.0 MiB of " in out
    assert all(any(word == "trainer.max_steps=8" for word in words) for words in trials[:1])
    typed = [[word for word in each if word.startswith("data.batch_size=")] for each in trials]
    assert {each[-1] for each in typed} == {"data.batch_size=4"}, "what the user has set stays"
    number = len(trials)
    assert number > 3
    again = command(*words)
    assert (again[0], again[1], len(trials)) == (EXIT_OK, out, number)
    found = json.loads(command(*words, "--json")[1])
    assert last.endswith(" ".join(found["overrides"]))
    assert found["left_out"]["+callbacks=channels_last"] == NO_EFFECT


def test_a_limit_that_nothing_fits_is_said(
    command: Command, tiny: list[str], trials: list[list[str]]
) -> None:
    code, _, err = command("tune", "lm", *tiny, "--memory", "10KiB", "--minutes", "0.2")
    assert code == EXIT_OUT_OF_MEMORY
    assert "no combination fits in 10.0 KiB of CPU (--memory)" in err
    assert trials == []
    assert "10: expected a size" in command("tune", "lm", "--memory", "10", code=2)[2]
