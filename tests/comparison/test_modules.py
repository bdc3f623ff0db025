"""`lightning_eff.compare` on a module of one's own: each trial in a process that may do what it likes."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

import lightning_eff
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.comparison import modules
from lightning_eff.comparison.result_table import FAILED, MEASURED
from lightning_eff.core.errors import ConfigError
from tests.support.models import Net, make_loader

CPU = {"accelerator": "cpu", "devices": 1}


def build() -> tuple[Any, Any]:
    return Net(dropout=0.0), make_loader()


def build_and_note(notes: Path) -> tuple[Any, Any]:
    with notes.open("a") as file:
        file.write("built\n")
    return build()


def build_slowly() -> tuple[Any, Any]:
    time.sleep(600)
    return build()


def build_nothing() -> tuple[Any, Any]:
    text = "there is no model"
    raise ValueError(text)


def build_and_die() -> tuple[Any, Any]:
    os.abort()


def test_a_trial_that_hangs_is_a_row(tmp_path: Path) -> None:
    (row,) = lightning_eff.compare(build_slowly, {}, rounds=2, limit_s=2.0, folder=tmp_path)
    assert (row.status, row.reason) == (FAILED, "no end after 2 s; it was killed")


@pytest.mark.slow
def test_a_trial_that_raises_or_dies_is_a_row(tmp_path: Path) -> None:
    reasons = {}
    for make in (build_nothing, build_and_die):
        folder = tmp_path / make.__name__
        (row,) = lightning_eff.compare(make, {}, rounds=2, folder=folder)
        assert row.status == FAILED
        reasons[make.__name__] = row.reason
    assert reasons["build_nothing"] == "ValueError: there is no model"
    assert reasons["build_and_die"].startswith("killed by signal 6")


@pytest.mark.slow
def test_trials_are_trained_alike_and_compared(tmp_path: Path) -> None:
    trials = {
        "baseline": CPU,
        "parts": CPU | {"callbacks": [MicroBatch(micro_batch_size=2)]},
        "double": CPU | {"precision": "64-true"},
        "wrong": CPU | {"precision": "7"},
    }
    notes = tmp_path / "built"
    noting = functools.partial(build_and_note, notes)
    rows = lightning_eff.compare(noting, trials, max_steps=8, rounds=1, folder=tmp_path)
    found = {row.technique: row for row in rows}
    assert [found[name].status for name in trials] == [MEASURED, MEASURED, MEASURED, FAILED]
    assert found["parts"].loss_difference == pytest.approx(0.0, abs=1e-5)
    assert found["parts"].peak_bytes is not None
    assert found["double"].peak_ratio is not None
    assert found["double"].peak_ratio > 1.5
    assert "precision" in found["wrong"].reason.lower()
    assert len(notes.read_text().splitlines()) == len(trials)
    again = lightning_eff.compare(noting, trials, max_steps=8, rounds=1, folder=tmp_path)
    assert [asdict(row) for row in again] == [asdict(row) for row in rows]
    assert len(notes.read_text().splitlines()) == len(trials) + 1, "only what failed is tried again"


@pytest.mark.parametrize("wrong", [{"max_steps": 3}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected at least"):
        lightning_eff.compare(build, {}, **wrong)


def test_a_build_that_no_other_process_can_call_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a function of a module or script"):
        lightning_eff.compare(lambda: None, {})  # pyright: ignore[reportArgumentType]


def test_other_code_and_other_settings_have_other_results(tmp_path: Path) -> None:
    one, other = modules._fingerprint(build), modules._fingerprint(build_nothing)
    assert one != other
    noting = [functools.partial(build_and_note, Path(name)) for name in ("a", "b", "a")]
    marks = [modules._fingerprint(each) for each in noting]
    assert marks[0] == marks[2] != marks[1]
    schedules = [{"callbacks": [GradientAccumulationScheduler({0: size})]} for size in (2, 4)]
    assert modules._describe(schedules[0]) != modules._describe(schedules[1])
    assert modules._describe(schedules[0]) == modules._describe(
        {"callbacks": [GradientAccumulationScheduler({0: 2})]}
    )
