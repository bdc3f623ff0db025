"""GaLore: what is projected, how little state there is, checkpoints without a class of the library's."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.build import build
from lightning_eff.optimizer.galore import GaLore
from lightning_eff.report.live_bytes import state_bytes

FACTORY = functools.partial(GaLore, lr=0.1, rank=2, update_proj_gap=2)


def stepped(model: nn.Module, steps: int) -> GaLore:
    optimizer = build(model, FACTORY)
    for _ in range(steps):
        model(torch.arange(3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32))


def test_hidden_matrices_alone_have_state_of_the_rank() -> None:
    model = make()
    optimizer = stepped(model, 1)
    assert optimizer.state[model[1].weight]["exp_avg"].shape == (32, 2)
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (16, 8)
    assert optimizer.outcome().numbers == {"hidden": 1}
    averages = 2 * 4 * (32 * 2 + 16 * 8 + 32)
    assert state_bytes(optimizer) == {"cpu": averages + 4 * 2 * 8}, "the projection is counted too"


def test_a_checkpoint_holds_tensors_and_plain_values_and_the_subspace_comes_back() -> None:
    full, resumed = make(), make()
    stepped(full, 5)
    first = stepped(resumed, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = build(resumed, FACTORY)
    second.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        resumed(torch.arange(3)).square().sum().backward()
        second.step()
        second.zero_grad()
    for left, right in zip(full.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_matrices_that_are_not_wider_than_the_rank_are_not_projected() -> None:
    optimizer = build(make(), functools.partial(GaLore, lr=0.1, rank=8))
    assert not optimizer.outcome().effective
    with pytest.raises(ConfigError, match="rank=0: expected a whole number of at least 1"):
        GaLore(make().parameters(), rank=0)


def test_a_copy_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="GaLore cannot be copied or pickled: build another"):
        copy.deepcopy(build(make(), FACTORY))
