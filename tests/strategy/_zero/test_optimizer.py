"""Optimizers that may step on slices of flat vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from lightning_eff.core.errors import ConflictError
from lightning_eff.strategy._zero.optimizer import ELEMENTWISE, single_optimizer
from tests.support.models import Net, make_trainer


def checked(kind: Any) -> Any:
    module: Any = Net()
    module.trainer = make_trainer()
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.01)
    return single_optimizer(module)[0]


@pytest.mark.parametrize("name", ELEMENTWISE["torch"])
def test_elementwise_optimizers_step_slices_as_the_whole(name: str) -> None:
    """What the list promises: two matrices move as two slices of them flattened do."""
    kind = getattr(optim, name)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 2, 8, 10, generator=generator) * torch.tensor([0.1, 10.0])[:, None, None]

    def moved(parts: list[torch.Tensor]) -> torch.Tensor:
        parameters = [torch.nn.Parameter(torch.zeros_like(part[0])) for part in parts]
        optimizer = kind(parameters, lr=0.01)
        for step in range(len(gradients)):
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part[step].clone()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    flat, whole = gradients.flatten(1), moved([*gradients.unbind(1)])
    assert bool(whole.all()), "negative control"
    torch.testing.assert_close(torch.cat([moved([flat[:, :101]]), moved([flat[:, 101:]])]), whole)
    assert type(checked(kind)) is kind


def test_others_are_rejected_unless_they_say_so() -> None:
    import bitsandbytes
    import pytorch_optimizer

    assert isinstance(checked(pytorch_optimizer.Lion), pytorch_optimizer.Lion)
    own = type("Own", (optim.SGD,), {})
    remedy = r"try: OptimizerChoice\(optimizer=partial\(torch\.optim\.AdamW, lr=\.\.\.\)\)"
    for kind in (own, optim.Adafactor, optim.LBFGS, pytorch_optimizer.Lamb, bitsandbytes.optim.AdamW8bit):
        with pytest.raises(ConflictError, match=rf"{kind.__name__} is not known[\s\S]*{remedy}"):
            checked(kind)
    own.elementwise = True
    assert isinstance(checked(own), own)
