"""A run with parameters that learn nothing stops after its first step, and the error names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.core.errors import NoEffectWarning
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.monitors.gradient_check import GradientCheck
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision.auto import AutoPrecision
from tests.support.models import Net, make_loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")


def fit(model: Net, **keywords: Any) -> None:
    unused = keywords.pop("unused", None)
    trainer = make_trainer(callbacks=[GradientCheck(unused=unused)], **({"max_steps": 3} | keywords))
    try:
        trainer.fit(model, make_loader())
    finally:
        assert all(not optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


def test_a_layer_that_is_not_called_is_named_unless_it_may_be(net: Callable[..., Net]) -> None:
    model = net()
    model.forgotten = nn.Linear(2, 2)
    with pytest.raises(GradientError, match=r"forgotten.weight, forgotten.bias"):
        fit(model)
    assert len(model.losses) == 1
    fit(model, unused=["forgotten.*"])
    model.forgotten.requires_grad_(False)
    fit(model)
    assert len(model.losses) == 1 + 3 + 3


def test_a_gradient_that_is_no_number_is_named(net: Callable[..., Net]) -> None:
    model = net()
    model.second.bias.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(GradientError, match=r"second\.bias"):
        fit(model)


def test_a_step_that_the_scaler_skips_is_no_step(net: Callable[..., Net]) -> None:
    """The first losses overflow float16 because of the scaler's initial scale."""
    plugin = AutoPrecision(precision="16-mixed")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model = net()
    fit(model, plugins=[plugin], max_steps=40)
    assert plugin.scaler.get_scale() < 2.0**40, "no step was skipped"


def test_a_window_of_batches_is_judged_as_a_whole(net: Callable[..., Net]) -> None:
    def alternating(batch: Any, batch_idx: int) -> torch.Tensor:
        used = model.first if batch_idx % 2 else model.second
        return used.weight.square().sum() + 0 * model.norm.weight.sum() + model.norm.bias.sum()

    model = net()
    model.training_step = alternating
    model.first.bias.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    fit(model, accumulate_grad_batches=2)
    with pytest.raises(GradientError, match=r"first\.weight"):
        fit(model)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("kind", "skipped", "window"),
    [("check", (0, 1, 2), 2), ("adapter", (0,), 1), ("in the backward pass", (0,), 1)],
)
def test_the_first_step_with_a_backward_pass_is_checked(
    net: Callable[..., Net], kind: str, skipped: tuple[int, ...], window: int
) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            if kind != "in the backward pass":
                return super().configure_optimizers()
            return InBackward(self.parameters(), lr=0.1, optimizer=torch.optim.SGD)

    for forgets in (False, True):
        model = net()
        model.__class__ = Skips
        saved = ["forgotten"] if forgets else []
        if forgets:
            model.forgotten = nn.Linear(2, 2)
        adapter = PeftAdapter(target_modules=["first", "second"], modules_to_save=saved, options={"r": 2})
        callback = adapter if kind == "adapter" else GradientCheck(unused=["norm.bias"])
        trainer = make_trainer(
            callbacks=[callback],
            max_steps=6,
            accumulate_grad_batches=window if kind != "in the backward pass" else 1,
        )
        if not forgets:
            trainer.fit(model, make_loader(64))
            continue
        with pytest.raises(GradientError, match="forgotten"):
            trainer.fit(model, make_loader(64))
        assert 1 <= len(model.losses) <= window


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_run_without_a_backward_pass_ends_with_an_error(net: Callable[..., Net]) -> None:
    model = net()
    model.training_step = lambda batch, batch_idx: None
    with pytest.raises(GradientError, match="parameters"):
        fit(model)


def test_a_run_whose_optimizer_is_never_stepped_warns(net: Callable[..., Net]) -> None:
    model = net()
    model.automatic_optimization = False
    with pytest.warns(NoEffectWarning, match="not checked"):
        fit(model, max_steps=-1, max_epochs=1)


class Breaks(Net):
    """Has a loss that is not finite in some batches."""

    bad_batches: Callable[[int], bool]
    value, breaks_gradients = torch.nan, True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.bad_batches(len(self.losses)):
            return loss
        return loss * self.value if self.breaks_gradients else loss + self.value


SPLITS: dict[str, Any] = {
    "plain": (list, {}, 1),
    "window": (list, {"accumulate_grad_batches": 2}, 2),
    "micro-batches": (lambda: [MicroBatch(micro_batch_size=2)], {}, 2),
    "float16": (lambda: [MicroBatch()], {"precision": "16-mixed"}, 1),
}


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("split", "limit", "value"),
    [
        ("plain", 10, torch.nan),
        ("window", 3, torch.inf),
        ("micro-batches", 1, -torch.inf),
        ("float16", 3, torch.nan),
    ],
)
def test_steps_that_are_not_finite_stop_the_run_at_the_limit(
    split: str, limit: int, value: float, tmp_path: Path
) -> None:
    make, keywords, passes = SPLITS[split]
    keywords = dict(keywords)
    if keywords.pop("precision", None):
        keywords["plugins"] = [AutoPrecision(precision="16-mixed")]
    model = Breaks()
    model.value, first = value, 8 * passes + 1  # the ninth step
    model.bad_batches = lambda count: count >= first
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_on_exception=True
    )
    check = GradientCheck(max_nonfinite_steps=limit)
    trainer = make_trainer(
        callbacks=[check, saver, *make()], max_steps=40, enable_checkpointing=True, **keywords
    )
    with pytest.raises(GradientError, match=rf"{limit} steps? .*step=8\.ckpt"):
        trainer.fit(model, make_loader(160))
    assert len(model.losses) == (8 + limit) * passes
    assert len(list(tmp_path.glob("*.ckpt"))) == trainer.global_step // 4, "none on the exception"


@pytest.mark.parametrize(
    ("limit", "bad_batches"),
    [(3, lambda count: count % 3 != 0), (None, lambda count: count > 2), (10, lambda count: count > 31)],
)
def test_fewer_steps_or_no_limit_do_not_stop_it(limit: int | None, bad_batches: Any) -> None:
    model = Breaks()
    model.breaks_gradients, model.bad_batches = False, lambda count: count > 1 and bad_batches(count)
    trainer = make_trainer(callbacks=[GradientCheck(max_nonfinite_steps=limit)], max_steps=40)
    trainer.fit(model, make_loader())
    assert len(model.losses) == 40
