"""A callback of this package in the Trainer of transformers is answered in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.callback_connector import _validate_callbacks_list

import lightning_eff
from lightning_eff.core.errors import ConflictError
from lightning_eff.core.managed import RejectsTransformersTrainer

ROOT = Path(__file__).parents[2]
CALLBACKS = sorted(
    name
    for name in lightning_eff.__all__
    if isinstance(kind := getattr(lightning_eff, name), type) and issubclass(kind, pl.Callback)
)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).sum()}


def huggingface_trainer(folder: Path, *callbacks: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, max_steps=1, disable_tqdm=True)
    data = [{"x": torch.ones(2)}] * 8
    return Trainer(Tiny(), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def test_every_callback_of_the_package_answers() -> None:
    assert len(CALLBACKS) > 15
    for name in CALLBACKS:
        assert issubclass(getattr(lightning_eff, name), RejectsTransformersTrainer), name


@pytest.mark.parametrize("given", [lightning_eff.EmptyCache, lightning_eff.EfficiencyReport()])
def test_the_trainer_of_transformers_is_answered_in_one_sentence(tmp_path: Path, given: Any) -> None:
    name = "EmptyCache" if isinstance(given, type) else "EfficiencyReport"
    with pytest.raises(ConflictError, match=name) as caught:
        huggingface_trainer(tmp_path, given)
    assert len(str(caught.value).splitlines()) == 1
    page = "docs/migration/transformers.md"
    assert page in str(caught.value)
    assert (ROOT / page).is_file()


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_one_that_is_added_later_is_answered_too(tmp_path: Path, verb: str) -> None:
    trainer = huggingface_trainer(tmp_path)
    trainer.add_callback(lightning_eff.EmptyCache())
    with pytest.raises(ConflictError, match="not of transformers' Trainer"):
        getattr(trainer, verb)()


def test_the_hooks_are_transformers_own_and_none_of_lightnings() -> None:
    from transformers import TrainerCallback

    answered = {name for name in vars(RejectsTransformersTrainer) if name.startswith("on_")}
    assert answered <= set(dir(TrainerCallback))
    assert not answered & set(dir(pl.Callback))
    _validate_callbacks_list([lightning_eff.EmptyCache()])
