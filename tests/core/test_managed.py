"""Lightning calls only the per-batch hooks that a callback defines."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.core.managed import BATCH_HOOKS
from lightning_eff.monitors.gradient_check import GradientCheck
from tests.support.models import Net, make_loader, make_trainer


class Counts(ExactResume):
    """A user's subclass, with a hook that calls the base's."""

    num_batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.num_batches += 1


class Forwards(pl.Callback):
    """Calls each hook of another callback itself."""

    def __init__(self, inner: pl.Callback) -> None:
        self.inner = inner

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.inner.setup(trainer, pl_module, stage)

    def on_train_batch_start(self, *args: Any) -> None:
        self.inner.on_train_batch_start(*args)


def test_lightning_calls_only_the_hooks_that_a_class_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in BATCH_HOOKS:
        monkeypatch.setattr(pl.Callback, name, lambda *_, name=name: called.append(name))
    callbacks = [ExactResume(), EmptyCache(every_n_steps=1), GradientCheck()]
    make_trainer(callbacks=callbacks, max_steps=2).fit(Net(), make_loader())
    assert len(BATCH_HOOKS) == 12
    assert called == []


def test_a_subclass_may_call_the_hook_of_its_base() -> None:
    counts = Counts()
    make_trainer(callbacks=[counts], max_steps=3).fit(Net(), make_loader())
    assert counts.num_batches == 3


def test_hooks_stay_where_another_callback_calls_them() -> None:
    make_trainer(callbacks=[Forwards(ExactResume())], max_steps=2).fit(Net(), make_loader())
