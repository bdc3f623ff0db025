"""Rows of a tensor that do not fit together are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.checkpoint.lazy_tensor import from_shards
from lightning_eff.core.errors import CheckpointError

FULL = torch.arange(10.0).reshape(5, 2)


@pytest.mark.parametrize(
    "shards",
    [
        [], [(0, FULL[:4])], [(0, FULL), (5, FULL[:1])], [(0, FULL[:3]), (2, FULL[2:])], [(1, FULL)],
        [(0, FULL[:2]), (3, FULL[3:])], [(0, FULL.double())], [(0, FULL[:, :1])], [(-1, FULL)],
    ],
)  # fmt: skip
def test_missing_or_foreign_rows_are_rejected(shards: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rows of a tensor of shape .5, 2. are missing or do not fit"):
        from_shards(FULL.to("meta"), shards)
