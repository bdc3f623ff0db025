"""Each row of the table of habits proposes what can be composed, and is found by what people type."""

from __future__ import annotations

import inspect

import pytest
from lightning.pytorch import Trainer

from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.habits import proposals, read_habits
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, parameter_keys
from lightning_eff.core.errors import UsageError

pytestmark = pytest.mark.usefixtures("empty_folder")
RESUMES = ("resume", "resume_from", "resume_from_checkpoint", "ckpt", "checkpoint")
VALUES = {
    "data": "python_source", "datamodule": "python_source", "optim": "sgd", "lr_scheduler": "cosine",
    "trainer.precision": "fp32", "trainer.strategy": "ddp", "trainer.logger": "csv", "accelerator": "cpu",
    "max_time": "00:01:00:00", "profiler": "simple", "deterministic": "true", "detect_anomaly": "true",
    **dict.fromkeys(("output_dir", "out_dir", "log_dir", "paths.output_dir"), "elsewhere"),
    **dict.fromkeys((*RESUMES, "trainer.ckpt_path", "trainer.resume_from_checkpoint"), "last"),
}  # fmt: skip
ROWS = [row.partition("=")[::2] for row in read_habits()]
PROPOSED = {row: proposals(row[0], row[1] or VALUES.get(row[0], "2")) for row in ROWS}


def test_what_is_proposed_exists() -> None:
    known = {
        *parameter_keys(),
        *TOP_LEVEL,
        *(f"trainer.{key}" for key in inspect.signature(Trainer).parameters),
    }
    own = {"strategy.find_unused_parameters"}  # of PyTorch's DDP, through Lightning's `**kwargs`
    for found in PROPOSED.values():
        assert found
        for word in " ".join(found).split():
            key, _, value = word.lstrip("+").partition("=")
            assert key in known | own, word
            names = value.strip("[]").split(",") if (CONF / key).is_dir() and value != "[]" else []
            assert all((CONF / key / f"{name}.yaml").is_file() for name in names), word


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids="=".join)
def test_what_is_proposed_composes(row: tuple[str, str]) -> None:
    key, value = row[0], row[1] or VALUES.get(row[0], "2")
    with pytest.raises(UsageError) as caught:
        compose_recipe("lm", [f"{key}={value}"])
    first, *tries = str(caught.value).splitlines()
    assert first.startswith(key.rpartition(".")[0] or key)
    assert [line.removeprefix("  try: ") for line in tries] == list(proposals(key, value))
    compose_recipe("lm", tries[0].removeprefix("  try: ").split())


def test_all_proposals_of_a_habit_are_shown_and_a_typo_is_none() -> None:
    with pytest.raises(UsageError) as caught:
        compose_recipe("images", ["hidden_size=32"])
    tries = ["  try: model.d_model=32", "  try: model.channels=32"]
    assert str(caught.value).splitlines()[1:] == tries
    with pytest.raises(UsageError, match="sed: no such key"):
        compose_recipe("baseline", ["sed=1", "precision=fp32"])
