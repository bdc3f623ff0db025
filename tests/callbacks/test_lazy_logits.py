"""Logits that are read in odd ways: as in a plain run, or rejected; never another number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_eff.callbacks.tiled_loss import tile_loss
from lightning_eff.core.errors import ConfigError

V, D = 12, 12
X = torch.arange(10).view(2, 5)
Y = (X * 7) % V


class Net(nn.Module):
    """As many features as classes, so that a mistaken axis shows in numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.table(x))))


def ce(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), Y.flatten())


def hooked_logits(net: Any) -> Tensor:
    logits = net(X)
    logits.register_hook(lambda grad: grad * 0.1)
    return ce(logits)


def hooked_head(net: Any) -> Tensor:
    net.head.register_forward_hook(lambda module, args, out: out / 3)
    return ce(net(X))


def without_gradients(net: Any) -> Tensor:
    with torch.no_grad():
        taught = net(X.flip(0))
    return F.mse_loss(net(X), taught) + ce(net(X))


def masked_without_gradients(net: Any) -> Tensor:
    logits = net(X)
    with torch.no_grad():
        logits[..., :3] = -1e4
    return ce(logits.float().double()) + logits.logsumexp(-1).mean()


def written_as_data(net: Any) -> Tensor:
    logits = net(X)
    logits.data.mul_(2.0)
    return ce(logits)


def written_after_a_view(net: Any) -> Tensor:
    logits = net(X)
    flat, halved = logits.view(-1, V), logits / 2
    logits.mul_(2.0)
    return F.cross_entropy(flat, Y.flatten()) + ce(halved)


def other_order_of_classes(net: Any) -> Tensor:
    return ce(net(X)[..., torch.arange(V).flip(0)]) + ce(net(X)[:, :, :V])


def replaced_forward(net: Any) -> Tensor:
    inner = net.head.forward
    net.head.forward = lambda x: inner(x) * 2
    return ce(net(X))


def under_autocast(net: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net.float()(X)
    return ce(logits.float()).double()


SAME: list[Callable[[Any], Tensor]] = [
    hooked_logits, hooked_head, without_gradients, masked_without_gradients, written_as_data,
    written_after_a_view, other_order_of_classes, replaced_forward, under_autocast,
]  # fmt: skip


def gradients(net: nn.Module, step: Callable[[Any], Tensor]) -> list[Tensor]:
    loss = step(net)
    loss.backward()
    return [loss.detach(), *(p.grad.double() for p in net.parameters() if p.grad is not None)]


def nets() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net().double()
    ours = copy.deepcopy(plain)
    tile_loss(ours, head="head", tile_budget_mib=1e-4)
    return plain, ours


@pytest.mark.parametrize("step", SAME, ids=lambda step: step.__name__)
def test_a_step_is_that_of_a_plain_run(step: Callable[[Any], Tensor]) -> None:
    plain, ours = nets()
    is_low = step is under_autocast
    tolerance = {"rtol": 2e-2, "atol": 5e-3} if is_low else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(gradients(ours, step), gradients(plain, step), **tolerance)


def after_an_update(net: Any) -> Tensor:
    logits = net(X)
    with torch.no_grad():
        net.head.weight.mul_(1.1)
    return ce(logits)


def with_other_weights(net: Any) -> Tensor:
    weights = {name: value * 1.5 for name, value in net.named_parameters()}
    return ce(torch.func.functional_call(net, weights, (X,)))


def after_the_input_changed(net: Any) -> Tensor:
    hidden = net.middle(net.table(X))
    logits = net.head(hidden)
    hidden += 1
    return ce(logits)


def retained_after(net: Any) -> Tensor:
    logits = net(X)
    loss = ce(logits)
    logits.retain_grad()
    return loss


def in_another_mode(net: Any) -> Tensor:
    logits = net(X)
    net.eval()
    return ce(logits)


@pytest.mark.parametrize(
    "step",
    [after_an_update, with_other_weights, after_the_input_changed, retained_after, in_another_mode],
    ids=lambda step: step.__name__,
)
def test_what_cannot_be_known_later_is_rejected(step: Callable[[Any], Tensor]) -> None:
    _, ours = nets()
    with pytest.raises(ConfigError, match="linear_cross_entropy"):
        step(ours)


def test_logits_that_are_kept_are_those_before_the_step() -> None:
    plain, ours = nets()
    kept: list[Tensor] = []
    for net in (plain, ours):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        logits = net(X)
        ce(logits).backward()
        optimizer.step()
        kept.append(logits.softmax(-1).detach())
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-12, atol=0.0)


def test_under_fabric_who_runs_the_backward_pass_is_checked_without_the_logits() -> None:
    net, fabric = Net(), Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    (projection,) = tile_loss(net).values()
    model = fabric.setup_module(net)
    fabric.backward(ce(model(X)))
    assert (projection.num_losses, dict(projection.readers)) == (1, {})
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward"):
        ce(model(X)).backward()
