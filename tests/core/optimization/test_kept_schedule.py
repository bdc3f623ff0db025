"""A module's own schedule moves the rates of another optimizer as it would have moved its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.errors import ConflictWarning
from lightning_eff.optimization.kept_schedule import KeptSchedule
from tests.support.models import Net, make_loader, make_trainer

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: StepLR(o, 3, gamma=0.5),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "LinearLR": lambda o: LinearLR(o, 0.25, total_iters=5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 8),
    "WarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), StepLR(o, 2)], [3]),
}


class Rates(Net):
    """Remembers the rate of every step."""

    def __init__(self, schedule: Any, interval: str = "step") -> None:
        super().__init__(lr=0.4)
        self.schedule = schedule
        self.interval = interval
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.4, momentum=0.9)
        schedule = self.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        group = self.trainer.optimizers[0].param_groups[-1]
        self.rates.append(group["lr"])
        self.momenta.append(group.get("momentum", 0.0))
        return super().training_step(batch, batch_idx)


CHOICE = functools.partial(AdamW, lr=0.01, weight_decay=0.1)


def fit(model: Any, *, choose: bool, **keywords: Any) -> Any:
    callbacks = [OptimizerChoice(optimizer=CHOICE)] if choose else []
    checkpoint = keywords.pop("ckpt_path", None)
    trainer = make_trainer(callbacks=callbacks, **({"max_steps": 12} | keywords))
    trainer.fit(model, make_loader(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_rates_are_the_same_share_of_the_new_rate(name: str, interval: str) -> None:
    torch.manual_seed(0)
    own, chosen = (Rates(SCHEDULES[name], interval) for _ in range(2))
    epochs: dict[str, Any] = {} if interval == "step" else {"max_steps": -1, "max_epochs": 5}
    fit(own, choose=False, **epochs)
    trainer = fit(chosen, choose=True, **epochs)
    assert isinstance(trainer.optimizers[0], AdamW)
    assert chosen.rates == pytest.approx([rate * 0.01 / 0.4 for rate in own.rates], rel=1e-12)
    assert len(set(own.rates)) > 1


def test_numbers_that_a_schedule_sets_itself_are_taken_as_they_are() -> None:
    def cycle(optimizer: Any) -> Any:
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=13)

    own, chosen = Rates(cycle), Rates(cycle)
    fit(own, choose=False)
    trainer = fit(chosen, choose=True)
    assert chosen.rates == pytest.approx(own.rates, rel=1e-12)
    assert max(chosen.rates) == pytest.approx(0.2, rel=0.1)
    assert trainer.optimizers[0].param_groups[0]["betas"] == (0.9, 0.999), "SGD has no betas to follow"


def test_a_plateau_is_followed_with_its_monitor() -> None:
    class Plateau(Rates):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.4)
            schedule = ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=10.0, threshold_mode="abs"
            )
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "train_loss"}

    chosen = Plateau(None)
    fit(chosen, choose=True, max_steps=-1, max_epochs=4)
    assert sorted(set(chosen.rates), reverse=True) == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.parametrize("shape", ["optimizer", "list", "lists", "dicts"])
def test_every_form_of_configure_optimizers_is_understood(shape: str) -> None:
    class Formed(Rates):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.4)
            if shape in ("optimizer", "list"):
                return optimizer if shape == "optimizer" else [optimizer]
            schedule = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}
            forms = {
                "lists": ([optimizer], [schedule]),
                "dicts": [{"optimizer": optimizer, "lr_scheduler": schedule}],
            }
            return forms[shape]

    model = Formed(None)
    fit(model, choose=True, max_steps=3)
    expected = [0.01] * 3 if shape in ("optimizer", "list") else [0.01, 0.005, 0.0025]
    assert model.rates == pytest.approx(expected)


@pytest.mark.parametrize("name", ["StepLR", "SequentialLR", "CosineAnnealingLR"])
def test_a_run_goes_on_with_the_schedule_where_it_was(name: str, tmp_path: Path) -> None:
    whole, first, second = (Rates(SCHEDULES[name]) for _ in range(3))
    fit(whole, choose=True, max_steps=-1, max_epochs=2)
    trainer = fit(first, choose=True, max_steps=-1, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    fit(second, choose=True, max_steps=-1, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert first.rates + second.rates == whole.rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", [*SCHEDULES, "OneCycleLR"])
@pytest.mark.parametrize("switches", [(False, True), (True, False), (True, False, True)])
def test_a_run_goes_on_with_or_without_the_choice(
    name: str, switches: tuple[bool, ...], tmp_path: Path
) -> None:
    """Rates and momenta are those of the uninterrupted run, whoever steps the schedule in which part."""
    make = SCHEDULES.get(name, lambda o: OneCycleLR(o, max_lr=0.8, total_steps=31))
    same = OptimizerChoice(optimizer=functools.partial(SGD, lr=0.4, momentum=0.9))
    whole = Rates(make)
    last = len(switches)
    fit(whole, choose=False, max_steps=-1, max_epochs=last)
    rates, momenta = list[float](), list[float]()
    for part, choose in enumerate(switches, start=1):
        model, path = Rates(make), tmp_path / f"{part - 1}.ckpt"
        trainer = make_trainer(callbacks=[same] if choose else [], max_steps=-1, max_epochs=part)
        trainer.fit(model, make_loader(), ckpt_path=path if part > 1 else None)
        trainer.save_checkpoint(tmp_path / f"{part}.ckpt")
        rates += model.rates
        momenta += model.momenta
    assert rates == pytest.approx(whole.rates, rel=1e-12)
    assert momenta == pytest.approx(whole.momenta, rel=1e-12)


def test_a_schedule_that_is_given_replaces_the_modules_own() -> None:
    model = Rates(SCHEDULES["StepLR"])
    constant = functools.partial(LambdaLR, lr_lambda=lambda step: 1.0)
    callbacks = [OptimizerChoice(optimizer=CHOICE, scheduler=constant)]
    make_trainer(callbacks=callbacks, max_steps=12).fit(model, make_loader())
    assert set(model.rates) == {0.01}


def test_a_rate_in_a_tensor_follows_too() -> None:
    model = Rates(SCHEDULES["ExponentialLR"])
    choice = OptimizerChoice(optimizer=functools.partial(AdamW, lr=torch.tensor(1.0), fused=True))
    make_trainer(callbacks=[choice], max_steps=3).fit(model, make_loader())
    assert float(choice._built.param_groups[0]["lr"]) == pytest.approx(0.9**3)


def test_several_schedules_of_one_optimizer_act_together() -> None:
    class Both(Rates):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.4)
            first = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}
            return [optimizer], [first, StepLR(optimizer, 1)]

    own, chosen = Both(None), Both(None)
    fit(own, choose=False, max_steps=-1, max_epochs=2)
    fit(chosen, choose=True, max_steps=-1, max_epochs=2)
    assert chosen.rates == pytest.approx([rate * 0.01 / 0.4 for rate in own.rates])


def test_a_plain_runs_checkpoint_brings_the_rates_that_it_had_come_to(tmp_path: Path) -> None:
    first = Rates(SCHEDULES["StepLR"])
    trainer = fit(first, choose=False, max_steps=-1, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    model = Rates(SCHEDULES["StepLR"])
    callbacks = [OptimizerChoice(optimizer=CHOICE)]
    trainer = make_trainer(callbacks=callbacks, max_steps=1)
    trainer.fit(model, make_loader())
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    schedule.load_state_dict(saved["lr_schedulers"][0])
    share = saved["lr_schedulers"][0]["_last_lr"][0] / 0.4
    assert share < 0.2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * share)


def test_a_group_that_comes_later_is_scheduled_with_the_first() -> None:
    class Unfreezes(Rates):
        def __init__(self) -> None:
            super().__init__(SCHEDULES["StepLR"], interval="step")
            self.backbone = self.first

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            optimizer = SGD(trained, lr=0.4)
            return [optimizer], [{"scheduler": StepLR(optimizer, 3), "interval": "step"}]

    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    model = Unfreezes()
    before = model.first.weight.detach().clone()
    callbacks = [OptimizerChoice(optimizer=CHOICE), finetuning]
    trainer = make_trainer(callbacks=callbacks, max_steps=-1, max_epochs=3)
    trainer.fit(model, make_loader())
    assert len(trainer.optimizers[0].param_groups) == 3
    assert not torch.equal(before, model.first.weight.detach())


def test_it_answers_as_the_scheduler_that_it_stands_for() -> None:
    class Steps(Rates):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            assert scheduler.last_epoch == scheduler.kept.last_epoch > 0
            assert scheduler.gamma == 0.9
            assert scheduler.get_last_lr() == [self.trainer.optimizers[0].param_groups[0]["lr"]] * 2

    fit(Steps(SCHEDULES["ExponentialLR"]), choose=True, max_steps=2)
    with pytest.raises(AttributeError):
        KeptSchedule.__new__(KeptSchedule).__getattr__("gamma")


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_keywords_of_a_step_reach_the_scheduler() -> None:
    class Steps(Rates):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=7)

    model = Steps(SCHEDULES["LambdaLR"])
    fit(model, choose=True, max_steps=2)
    assert model.rates[1] == pytest.approx(0.01 / 8)


def test_a_schedule_that_the_module_steps_itself_is_said_to_have_no_effect() -> None:
    class Keeps(Rates):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.4)
            self.mine = ExponentialLR(optimizer, 0.5)
            return optimizer

    with pytest.warns(ConflictWarning, match="a schedule that Keeps steps itself does not reach AdamW"):
        fit(Keeps(None), choose=True, max_steps=1)


def test_shares_are_kept_beside_a_schedule_that_set_rates_and_is_replaced() -> None:
    class Cycles(Rates):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.first.parameters(), "lr": 0.01}, {"params": self.second.parameters()}]
            optimizer = SGD(groups, lr=0.1)
            cycle = OneCycleLR(optimizer, [0.01, 0.1], total_steps=9, cycle_momentum=False)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    choice = OptimizerChoice(optimizer=functools.partial(SGD, lr=1.0), scheduler=ConstantLR)
    make_trainer(callbacks=[choice], max_steps=1).fit(Cycles(None), make_loader())
    assert [group["initial_lr"] for group in choice._built.param_groups] == pytest.approx([0.1, 1.0])
