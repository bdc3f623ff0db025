"""Rules about classes of other libraries apply to the right class, with an accepted remedy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import schedulefree
import torch
import torchao.optim
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core import rules
from lightning_eff.core.errors import ConflictError, ConflictWarning, EnvironmentLacksError
from lightning_eff.core.rules import LIBRARY_RULES
from lightning_eff.core.technique import Verdict
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.muon import Muon
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.models import Deep, Net, make_loader, make_trainer

FREE = schedulefree.AdamWScheduleFree
HALF = functools.partial(WarmupDecay, total_steps=4)


def found(optimizer: Any, *others: Any, run: dict[str, str] | None = None, **keywords: Any) -> list[Any]:
    choice = OptimizerChoice(optimizer=optimizer, **keywords)
    return rules.check_rules([choice, *choice.components(), *others], run or {})


PAGED = bitsandbytes.optim.PagedAdamW8bit


@pytest.mark.parametrize(
    ("optimizers", "others", "run", "verdict"),
    [
        ([torch.optim.Adafactor, torch.optim.Muon, Muon], [DeepSpeedStrategy], {}, Verdict.REJECTED),
        ([PAGED, CpuOffload], [FSDPStrategy, ModelParallelStrategy], {}, Verdict.REJECTED),
        ([PAGED, CpuOffload], [None], {"run/cpu": "device cpu"}, Verdict.WARNED),
        ([FREE], [WeightAveraging, StochasticWeightAveraging], {}, Verdict.REJECTED),
    ],
)
def test_an_optimizer_conflicts_with_what_it_excludes(
    optimizers: list[Any], others: list[Any], run: dict[str, str], verdict: Verdict
) -> None:
    for optimizer, other in itertools.product(optimizers, others):
        assert {finding.rule.verdict for finding in found(optimizer, other, run=run)} == {verdict}
        assert found(optimizer) == []
        assert found(torch.optim.AdamW, other, run=run) == []
    assert found(bitsandbytes.optim.AdamW8bit, run={"run/cpu": "device cpu"}) == []


def test_torchaos_optimizers_need_a_compiler() -> None:
    (finding,) = found(torchao.optim.AdamW8bit)
    assert finding.rule.name == "machine/compiler"
    with pytest.raises(EnvironmentLacksError, match="compiler"):
        rules.raise_rejected([finding])
    assert found(torchao.optim.AdamW8bit, run={"machine/compiler": "g++"}) == []
    assert found(bitsandbytes.optim.AdamW8bit) == [], "a class of the same name and another package"


def test_schedule_free_warns_of_a_schedule_and_of_batch_norms(net: Callable[..., Net]) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    factory = functools.partial(FREE, lr=0.01)
    choice = OptimizerChoice(optimizer=factory, scheduler=HALF)
    with pytest.warns(ConflictWarning, match="schedule"):
        make_trainer(callbacks=[choice], max_steps=1).fit(net(), make_loader())
    with pytest.warns(ConflictWarning, match="batch norms") as warned:
        make_trainer(callbacks=[OptimizerChoice(optimizer=factory)], max_steps=1).fit(Normed(), make_loader())
    assert len([w for w in warned if w.category is ConflictWarning]) == 1, "said once"


def test_fused_with_clipping_under_lightnings_mixed_precision_is_rejected(
    net: Callable[..., Net],
) -> None:
    fused = functools.partial(torch.optim.AdamW, fused=True)
    callbacks = [OptimizerChoice(optimizer=fused)]
    trainer = make_trainer(callbacks=callbacks, precision="bf16-mixed", gradient_clip_val=1.0)
    with pytest.raises(ConflictError, match="gradient_clip_val"):
        trainer.fit(net(), make_loader())
    assert found(fused, run={"run/clipping": "gradient_clip_val"}) == []


def test_rules_apply_to_the_modules_own_optimizer(net: Callable[..., Net]) -> None:
    model = Deep()
    model.configure_optimizers = lambda: FREE(model.parameters(), lr=0.01)
    trainer = make_trainer(callbacks=[WeightAveraging(), GradientCheckpointing()])
    with pytest.raises(ConflictError, match="AdamWScheduleFree with WeightAveraging"):
        trainer.fit(model, make_loader())


def test_every_rule_has_a_reason_and_a_remedy_and_every_library_class_exists() -> None:
    packages = {"torch": torch.optim, "torchao": torchao.optim.adam, "schedulefree": schedulefree}
    packages |= {"bitsandbytes": bitsandbytes.optim}
    packages["bitsandbytes/Optimizer8bit"] = bitsandbytes.optim.optimizer
    for name, facts in LIBRARY_RULES.items():
        package, _, kind = name.partition("/")
        owner = packages.get(name, packages.get(package))
        assert owner is None or hasattr(owner, kind), name
        for rule in (*facts.needs, *facts.excludes):
            assert rule.reason
            assert rule.remedies
