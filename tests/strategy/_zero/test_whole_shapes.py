"""Divided weights have their shapes while an optimizer is made, and no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.strategy._zero.whole_shapes import whole_shapes


def test_groups_by_dimension_are_those_of_the_whole_model() -> None:
    model: Any = nn.Linear(3, 5)
    model.weight.ds_shape = torch.Size((1 << 20, 1 << 20))
    model.weight.data = part = torch.empty(0)
    bias = model.bias.data
    with whole_shapes(model):
        assert model.weight.dim() == 2
        assert model.weight.shape == (1 << 20, 1 << 20)
        assert model.weight.untyped_storage().nbytes() == 4
        assert model.bias.data.data_ptr() == bias.data_ptr()
    assert model.weight.data.data_ptr() == part.data_ptr()
    assert model.weight.shape == (0,)


def test_parts_come_back_when_the_optimizer_is_refused() -> None:
    model: Any = nn.Linear(3, 5)
    model.weight.ds_shape, model.weight.data = torch.Size((5, 3)), torch.empty(0)
    text = "no"
    with pytest.raises(ValueError, match=text), whole_shapes(model):
        raise ValueError(text)
    assert model.weight.shape == (0,)
