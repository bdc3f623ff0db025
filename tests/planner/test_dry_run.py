"""A recipe's predicted peak is what its run's report measures, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.planner.dry_run import ExampleBatch, dry_run
from lightning_eff.run import build


def compose(recipe: str, *words: str) -> dict[str, Any]:
    return dict(composition.compose_recipe(recipe, list(words), RecipePath.of([])).values)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::lightning_eff.core.errors.NoEffectWarning")
def test_predicted_is_measured(tiny: list[str], tmp_path: Path) -> None:
    words = ["data.batch_size=4", "callbacks.micro_batch.micro_batch_size=2", "data.context_length=8"]
    window = "callbacks.gradient_accumulation.global_batch_size=4"
    values = compose("low_memory", *tiny, "trainer.max_steps=2", *words, window, "+callbacks=data_preload")
    values |= {"monitors": {"efficiency_report": values["monitors"]["efficiency_report"]}, "logger": None}
    synthetic = dry_run(values)
    measured = build(values, recipe="low_memory", run_dir=tmp_path / "run").fit()["measured"]["peak_bytes"]
    found = dry_run(values)
    assert (synthetic.reason, found.reason) == ("", "")
    assert found.peak is not None
    assert synthetic.peak is not None
    assert found.peak.num_bytes == synthetic.peak.num_bytes == measured
    assert any("synthetic" in each for each in synthetic.assumed)
    assert not any("synthetic" in each for each in found.assumed)


def test_prepared_data_give_a_real_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    example = ExampleBatch.of(compose("images"))
    assert example.batch[0].shape == (64, 1, 8, 8)
    assert (example.batch_size, example.num_batches) == (64, 23), "1438 of 1797 digits"


def test_a_failure_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = compose("baseline")
    values["data"] = values["data"] | {"source_dir": "/nowhere"}
    assert "/nowhere" in dry_run(values).reason
