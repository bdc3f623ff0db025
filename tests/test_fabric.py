"""Techniques as functions, in a hand-written loop under Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_eff.callbacks.empty_cache import release
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.callbacks.torch_compile import compile_in_place
from lightning_eff.core import model_surgery
from lightning_eff.core.model_surgery import ModelChange, Stage
from lightning_eff.core.optimization.build import build
from lightning_eff.precision.auto import step_context
from tests.support.models import Deep, make_loader
from tests.support.techniques import SGD, assert_equal, plain_loop

NUM_STEPS = 10


@pytest.mark.parametrize(
    ("precision", "policy", "compiled"),
    [("32-true", "every_n", False), ("bf16-mixed", "selective", False), ("32-true", "full", True)],
)
def test_a_hand_written_loop_equals_a_loop_without_techniques(
    deep: Callable[..., Deep], precision: str, policy: str, compiled: bool
) -> None:
    torch.compiler.reset()
    plain = deep()
    expected = plain_loop(plain, precision, NUM_STEPS)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = deep()
    changes: list[tuple[Stage, ModelChange]]  # in the wrong order: `apply` sorts them by stage
    changes = [(Stage.COMPILE, lambda m: len(compile_in_place(m, backend="aot_eager")))] if compiled else []
    changes.append((Stage.CHECKPOINT, lambda m: len(recompute(m, policy=policy))))
    assert model_surgery.apply(model, changes) == [2 if policy == "every_n" else 3] * len(changes)
    assert model_surgery.apply(model, changes) == [0] * len(changes), "the second call changes nothing"
    ours, optimizer = fabric.setup(model, build(model, SGD))
    while len(model.losses) < NUM_STEPS:
        for x, y in fabric.setup_dataloaders(make_loader()):
            with step_context(precision, "cpu"):
                loss = F.cross_entropy(ours(x).float(), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            model.losses.append(float(loss.detach()))
        release("cpu")
    assert_equal(model, plain, expected, rtol=1e-5 if compiled else 0.0)
