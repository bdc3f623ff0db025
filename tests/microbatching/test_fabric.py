"""ExactGradient: the step of GradientAccumulation and MicroBatch in a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching.fabric import ExactGradient
from tests.support.faults import Fault, out_of_memory, stateful_model
from tests.support.language import (
    assert_same_training,
    language_model,
    token_rows,
    train_reference,
    window_batches,
)
from tests.support.ranks import is_equal

Size = int | str | None


def train(weighted: bool, size: Size, batch_size: int, window: int, fabric: Fabric | None) -> Any:
    """Train in a loop under Fabric or in plain PyTorch: 26 samples per epoch, `window` batches per step."""
    model = language_model(weighted)
    x, y = token_rows()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    wrapped: Any = model
    if fabric is not None:
        wrapped, optimizer = fabric.setup(model, optimizer)
        wrapped.mark_forward_method("loss")
    gradient = ExactGradient(wrapped, fabric=fabric, micro_batch_size=size)

    def step(batch: Any) -> Any:
        loss, weight = wrapped.loss(batch)
        return {"loss": loss, "loss_weight": weight} if weighted else loss

    num_batches = -(-len(x) // batch_size)
    steps = window_batches(window, num_batches)
    for _ in range(50):
        batches = [slice(b * batch_size, (b + 1) * batch_size) for b in next(steps)]
        loss = gradient.backward(step, *((x[rows], y[rows]) for rows in batches))
        assert not loss.requires_grad
        model.gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        with gradient.update(optimizer):
            optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize(
    ("weighted", "size", "batch_size", "window", "wrapped"),
    [(True, None, 2, 5, False), (False, "auto", 10, 1, True), (True, 3, 4, 2, True)],
)
def test_a_hand_written_loop_steps_on_the_full_batch(
    weighted: bool, size: Size, batch_size: int, window: int, wrapped: bool
) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true") if wrapped else None
    model = train(weighted, size, batch_size, window, fabric)
    assert_same_training(model, train_reference(weighted, batch_size * window // 2, None, 50, 13), None)


def run(gradient_of: Callable[[Any], ExactGradient], fault: Fault | None = None) -> list[Tensor]:
    model = stateful_model(fault)
    model.log = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    gradient = gradient_of(model)
    optimizer: Any = model.configure_optimizers()[0][0]
    generator = torch.Generator().manual_seed(3)

    def step(batch: Any) -> Any:
        return model.training_step(batch, 0)

    for _ in range(4):
        x = torch.randn(12, 6, generator=generator)
        w = torch.rand(12, generator=generator)
        batch = {"x": x, "y": torch.arange(12) % 3, "w": w, "ids": list(range(12))}
        gradient.backward(step, batch, batch)
        with gradient.update(optimizer):
            optimizer.step()
    return [
        *(p.detach() for p in model.parameters()),
        *model.buffers(),
        torch.rand(2),
        torch.tensor(model.losses),
    ]


@pytest.mark.parametrize(("phase", "at", "size"), [("backward", 0, 6), ("update", 2, "auto")])
def test_running_out_of_memory_leaves_no_trace(phase: str, at: int, size: Size) -> None:
    """In the first batch of a step, which is then computed in halves; and in an update."""
    ours = run(lambda model: ExactGradient(model, micro_batch_size="auto"), Fault(phase, at=at))
    assert is_equal(ours, run(lambda model: ExactGradient(model, micro_batch_size=size)))


def test_bad_input_is_rejected() -> None:
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="micro_batch_size=0"):
        ExactGradient(layer, micro_batch_size=0)
    with pytest.raises(TypeError, match="float"):
        ExactGradient(layer).backward(lambda _: 1.0, torch.ones(2, 2))
    with pytest.raises(torch.OutOfMemoryError):
        ExactGradient(layer, micro_batch_size=1).backward(lambda _: _fail(), torch.ones(2, 2))


def _fail() -> None:
    raise out_of_memory()
