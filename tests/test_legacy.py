"""Every technique rejects a Trainer of the package `pytorch_lightning`, which has other classes."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

import pytest
import pytorch_lightning as legacy
import torch
from torch import Tensor, nn

from lightning_eff.core.errors import ConflictError
from lightning_eff.monitors import _attach
from tests.support.models import make_loader
from tests.support.techniques import TECHNIQUES, class_of

SENTENCE = (
    "{}: this Trainer comes from the package pytorch_lightning, which lightning_eff does not support: "
    "import lightning.pytorch instead"
)
GIVEN: dict[str, dict[str, Any]] = {
    "callbacks/optimizer_choice": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
    "callbacks/gradient_accumulation": {"global_batch_size": 8},
}
"""Required arguments of techniques."""
CALLBACKS = [name for name in TECHNIQUES if name.startswith(("callbacks/", "monitors/"))]
PLUGINS = [name for name in TECHNIQUES if name.startswith(("strategy/", "precision/", "checkpoint_io/"))]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*isinstance.*LeafSpec"
)


class LegacyNet(legacy.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def legacy_trainer(**keywords: Any) -> legacy.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return legacy.Trainer(
        accelerator="cpu", devices=1, max_steps=1, enable_model_summary=False, **quiet, **keywords
    )


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_and_monitor_rejects_a_legacy_trainer(name: str) -> None:
    made = class_of(name)(**GIVEN.get(name, {}))
    with pytest.raises(ConflictError) as raised:
        legacy_trainer(callbacks=[made]).fit(LegacyNet(), make_loader())
    assert str(raised.value) == SENTENCE.format(type(made).__name__)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_legacy_trainer_rejects_a_strategy_or_plugin_with_the_reason(name: str) -> None:
    """No code of this package runs before; the Trainer's own error has the object's repr."""
    made = class_of(name)()
    keywords: dict[str, Any] = {"strategy": made} if name.startswith("strategy/") else {"plugins": [made]}
    reason = f"lightning_eff.{type(made).__name__}, for a Trainer of lightning.pytorch and not of pytorch_"
    with pytest.raises((ValueError, legacy.utilities.exceptions.MisconfigurationException), match=reason):
        legacy_trainer(**keywords)


def test_a_report_requested_by_an_environment_variable_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [each for each in entry_points(group="pytorch_lightning.callbacks_factory") if "eff" in each.name]
    assert [each.value for each in own] == ["lightning_eff.monitors._attach:refuse_legacy"]
    monkeypatch.setenv(_attach.VARIABLE, "1")
    with pytest.raises(ConflictError) as raised:
        legacy_trainer()
    assert str(raised.value) == SENTENCE.format("LIGHTNING_EFF_REPORT=1")
    monkeypatch.delenv(_attach.VARIABLE)
    assert not any(type(each).__module__.startswith("lightning_eff.") for each in legacy_trainer().callbacks)
