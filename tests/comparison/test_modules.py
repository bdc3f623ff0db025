"""`lightning_eff.compare` on a module of one's own: each trial in a process that may do what it likes."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import lightning_eff
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.comparison import modules
from lightning_eff.comparison.result_table import FAILED, MEASURED
from lightning_eff.core.errors import ConfigError
from tests.support.models import Net, make_loader

CUT: dict[str, Any] = {"precision": "32", "callbacks": [MicroBatch(micro_batch_size=2)]}
CPU = {"accelerator": "cpu", "devices": 1}


def build() -> tuple[Any, Any]:
    return Net(dropout=0.0), make_loader()


def build_and_note(notes: Path) -> tuple[Any, Any]:
    with notes.open("a") as file:
        file.write("built\n")
    return build()


def build_nothing() -> tuple[Any, Any]:
    text = "there is no model"
    raise ValueError(text)


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


def test_what_no_other_process_can_receive_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a function of a module or script"):
        lightning_eff.compare(lambda: None, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="keywords that another process can receive"):
        lightning_eff.compare(build, {"x": {"callbacks": [lambda: None]}})


def test_other_code_and_other_settings_have_other_results() -> None:
    assert modules._digest(build, {}, 1) != modules._digest(build_nothing, {}, 1)
    assert modules._digest(build, {}, 1) != modules._digest(build, {}, 2)
    noting = [functools.partial(build_and_note, Path(name)) for name in ("a", "b", "a")]
    first, second, third = (modules._digest(each, {}, 1) for each in noting)
    assert first == third != second
    cuts = [{"callbacks": [MicroBatch(micro_batch_size=size)]} for size in (2, 4, 2)]
    first, second, third = (modules._digest(build, keywords, 1) for keywords in cuts)
    assert first == third != second
    program = "import tests.comparison.test_modules as m; print(m.modules._digest(m.build, m.CUT, 1))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{modules._digest(build, CUT, 1)}\n", "in the next process too"
