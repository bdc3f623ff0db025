"""Functions for custom loops check their settings and warn, as the callbacks do (tests/messages.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.callbacks.tiled_conv import tile_convs
from lightning_eff.callbacks.tiled_loss import tile_loss
from lightning_eff.callbacks.tiled_mlp import tile_mlps
from lightning_eff.callbacks.triton_gemm import swap
from lightning_eff.core.errors import ConfigError, NoEffectWarning

CHANGES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (tile_loss, {"tile_budget_mib": "big"}, "tile_budget_mib='big'"),
    (tile_mlps, {"min_tokens": 0}, "min_tokens=0"),
    (tile_convs, {"min_pixels": 0}, "min_pixels=0"),
    (swap, {"min_features": 0}, "min_features=0"),
]


@pytest.mark.parametrize(("change", "arguments", "text"), CHANGES)
def test_functions_for_custom_loops_check_and_warn_as_the_callbacks(
    change: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        change(torch.nn.Linear(2, 2), **arguments)
    with pytest.warns(NoEffectWarning) as caught:
        assert change(torch.nn.Linear(2, 2)) == {}
    assert [each.filename for each in caught] == [__file__]
