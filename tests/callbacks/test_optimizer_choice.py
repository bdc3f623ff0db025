"""OptimizerChoice and the function behind it: groups, fused, schedules by optimizer step, rejections."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import schedulefree
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.errors import ConfigError, ConflictError, NoEffectWarning
from lightning_eff.core.optimization.build import build
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.optimizer.muon import Muon
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.models import Net, fit, make_loader, make_trainer, seeded
from tests.support.ranks import is_equal

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5, fused=True)
FREE = functools.partial(schedulefree.AdamWScheduleFree, lr=0.01)


def test_norms_and_biases_get_no_decay_and_frozen_parameters_no_group(net: Callable[..., Net]) -> None:
    model = net()
    model.first.bias.requires_grad_(False)
    optimizer = build(model, ADAMW)
    decayed, rest = optimizer.param_groups
    assert {id(p) for p in decayed["params"]} == {id(model.first.weight), id(model.second.weight)}
    assert [decayed["weight_decay"], rest["weight_decay"]] == [0.5, 0.0]
    assert {id(p) for p in rest["params"]} == {id(p) for p in (*model.norm.parameters(), model.second.bias)}


def test_the_modules_own_method_is_restored(net: Callable[..., Net]) -> None:
    model = net()
    choice = OptimizerChoice(optimizer=ADAMW)
    trainer = fit(model, choice, max_steps=1)
    assert isinstance(trainer.optimizers[0], torch.optim.AdamW)
    assert "AdamW (fused) over 6 tensors in 2 groups" in choice.outcome().did
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert choice.outcome().numbers["state_bytes"] == {"cpu": 8 * num_parameters + 6 * 4}
    assert isinstance(model.configure_optimizers(), torch.optim.SGD)
    assert "load_checkpoint" not in trainer.strategy.checkpoint_io.__dict__


def test_a_rate_of_zero_warns_unless_a_schedule_raises_it(net: Callable[..., Net]) -> None:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-400)  # 0 as a number
    with pytest.warns(NoEffectWarning):
        fit(net(), OptimizerChoice(optimizer=adamw), max_steps=1)
    warmup = functools.partial(WarmupDecay, warmup_steps=2)
    fit(net(), OptimizerChoice(optimizer=adamw, scheduler=warmup), max_steps=1)


def test_a_schedule_steps_once_per_optimizer_step_and_gets_their_number(net: Callable[..., Net]) -> None:
    choice = OptimizerChoice(optimizer=ADAMW, scheduler=functools.partial(WarmupDecay, warmup_steps=2))
    trainer = fit(net(), choice, accumulate_grad_batches=2, max_steps=6)
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.total_steps == schedule.last_epoch == 6
    assert "lr 0.005 at the start, 0.001 at the end" in choice.outcome().did


def averaged(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the evaluation weights from a loop as in schedulefree's documentation."""
    model = seeded(Net, dropout=0.0)
    optimizer = FREE(model.parameters())
    optimizer.train()
    batches = itertools.cycle(make_loader())
    for _ in range(num_steps):
        x, y = next(batches)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model.first.weight.detach().clone()
    optimizer.eval()
    return trained, model.first.weight.detach().clone()


def test_schedule_free_weights_are_switched_around_validation_checkpoints_and_the_end(
    net: Callable[..., Net], tmp_path: Path
) -> None:
    model, at_training, at_validation = net(dropout=0.0), list[Any](), list[Any]()

    def save(trainer: pl.Trainer, *_: Any) -> None:
        for weights_only in (True, False):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}-{weights_only}.ckpt", weights_only)

    look = LambdaCallback(
        on_train_batch_start=lambda *_: at_training.append(model.first.weight.detach().clone()),
        on_validation_batch_start=lambda *_: at_validation.append(model.first.weight.detach().clone()),
    )
    callbacks = [OptimizerChoice(optimizer=FREE), look, LambdaCallback(on_train_batch_end=save)]
    trainer = make_trainer(callbacks=callbacks, max_steps=8, val_check_interval=5, num_sanity_val_steps=2)
    trainer.fit(model, make_loader(), make_loader(8))
    for weights_only in (True, False):
        saved = torch.load(tmp_path / f"3-{weights_only}.ckpt", weights_only=True)["state_dict"]
        torch.testing.assert_close(saved["first.weight"], averaged(3)[1], rtol=1e-5, atol=1e-7)
    trained, evaluated = averaged(5)
    torch.testing.assert_close(at_validation[-1], evaluated, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(at_training[5], trained, rtol=1e-5, atol=1e-7)
    assert (trained - evaluated).abs().max() > 1e-4, "training and evaluation weights are equal"
    torch.testing.assert_close(model.first.weight.detach(), averaged(8)[1], rtol=1e-5, atol=1e-7)
    assert "save_checkpoint" not in trainer.__dict__


def test_after_an_exception_the_module_has_the_evaluation_weights(net: Callable[..., Net]) -> None:
    class Breaks(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise RuntimeError("on purpose")

    model = seeded(Breaks, dropout=0.0)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, OptimizerChoice(optimizer=FREE))
    torch.testing.assert_close(model.first.weight.detach(), averaged(4)[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_freed_at_the_end_of_each_step_and_not_inside_a_window(
    net: Callable[..., Net], accumulate: int
) -> None:
    for choose in (True, False):
        model, counts = net(), list[int]()
        model.first.register_forward_pre_hook(
            lambda *_, model=model, counts=counts: counts.append(
                sum(p.grad is not None for p in model.parameters())
            )
        )
        callbacks = [OptimizerChoice(optimizer=ADAMW)] if choose else []
        fit(model, *callbacks, max_steps=3, accumulate_grad_batches=accumulate)
        held = {(True, 1): [0, 0, 0], (False, 1): [0, 6, 6]}
        held |= {(True, 2): [0, 6, 0, 6, 0, 6], (False, 2): [0, 6, 6, 6, 6, 6]}
        assert counts == held[choose, accumulate]


@pytest.mark.parametrize("how", ["module", "callback"])
def test_gradients_are_kept_if_a_hook_may_read_them(how: str) -> None:
    seen: list[bool] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        seen.append(module.first.weight.grad is not None)

    class Reads(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step:
                look(None, self)

    choice = OptimizerChoice(optimizer=ADAMW)
    readers = [LambdaCallback(on_train_batch_end=look)] if how == "callback" else []
    fit(Reads() if how == "module" else Net(), choice, *readers, max_epochs=1)
    assert seen
    assert all(seen)
    assert "may read them" in choice.outcome().did


def test_a_layer_that_is_unfrozen_later_is_trained_as_by_the_modules_own_optimizer() -> None:
    class Later(Net):
        def on_train_epoch_start(self) -> None:
            self.first.requires_grad_(self.current_epoch >= 1)

    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    results = []
    for kinds in ([], [sgd], [functools.partial(InBackward, optimizer=sgd)]):
        callbacks = [
            OptimizerChoice(optimizer=functools.partial(kind, lr=0.05, weight_decay=0.0)) for kind in kinds
        ]
        model = seeded(Later, dropout=0.0)
        model.first.requires_grad_(False)
        fit(model, *callbacks, max_epochs=2)
        results.append(model.first.weight.detach())
    assert is_equal(results[1:], [results[0]] * 2)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings(
    "ignore:CpuOffload does nothing here", "ignore:optimizer/cpu_offload with device cpu"
)
@pytest.mark.parametrize("kind", [InBackward, CpuOffload])
def test_adamw_and_wrapper_optimizers_resume_from_each_others_state(
    kind: Any, net: Callable[..., Net], tmp_path: Path
) -> None:
    kinds = [ADAMW, functools.partial(kind, weight_decay=0.5)]  # the learning rate is in the checkpoint
    for first in kinds:
        path, losses = tmp_path / "2.ckpt", []
        fit(net(dropout=0.0), OptimizerChoice(optimizer=first), max_steps=2).save_checkpoint(path)
        for second in kinds:
            model = net(dropout=0.0)
            fit(model, OptimizerChoice(optimizer=second), max_steps=4, ckpt_path=path)
            losses.append(model.losses)
        assert losses[0] == losses[1]


def test_a_factory_that_hides_its_class_is_called_to_find_it(net: Callable[..., Net]) -> None:
    opaque: list[Any] = [lambda groups, kind=kind: kind(groups) for kind in (ADAMW, Muon)]
    transparent, hidden = build(net(), ADAMW), build(net(), opaque[0])
    shapes = [[(len(g["params"]), g["weight_decay"]) for g in o.param_groups] for o in (transparent, hidden)]
    assert shapes[0] == shapes[1]
    table = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4, bias=False))
    assert build(table, opaque[1]).outcome().numbers == {"hidden": 1, "rest": 1}


def test_manual_optimization_and_a_rate_finder_are_rejected(net: Callable[..., Net]) -> None:
    model = net()
    model.automatic_optimization = False
    with pytest.raises(ConfigError):
        OptimizerChoice(optimizer=ADAMW).replace(model)
    with pytest.raises(ConflictError):  # the rate that it finds would be ignored
        fit(net(), OptimizerChoice(optimizer=ADAMW), pl.callbacks.LearningRateFinder())


@pytest.mark.filterwarnings("ignore:OptimizerChoice. no effect")
def test_a_replaced_optimizer_in_the_backward_pass_does_not_step(net: Callable[..., Net]) -> None:
    model = net()
    model.configure_optimizers = lambda: InBackward(model.parameters(), lr=0.1)
    before = model.first.weight.detach().clone()
    choice = OptimizerChoice(optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    fit(model, choice, max_steps=2)
    assert torch.equal(model.first.weight.detach(), before)


def test_a_backward_pass_in_a_validation_is_not_a_step(net: Callable[..., Net]) -> None:
    class Probes(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                self(batch[0]).sum().backward()

    results = []
    for kind in (torch.optim.SGD, functools.partial(InBackward, optimizer=torch.optim.SGD)):
        model = seeded(Probes, dropout=0.0)
        choice = OptimizerChoice(optimizer=functools.partial(kind, lr=0.1, weight_decay=0.0))
        trainer = make_trainer(callbacks=[choice], max_steps=10, inference_mode=False, num_sanity_val_steps=0)
        trainer.fit(model, make_loader(), make_loader(8))
        results.append(model.first.weight.detach())
    assert torch.equal(*results)
