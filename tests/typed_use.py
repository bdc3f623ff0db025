"""What a user's type checker makes of the public names: pyright reads this file, nothing calls it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import lightning_eff
from lightning_eff import EmptyCache, ExactGradient, TritonLinear, gemm, token_logprobs


def use() -> None:
    """Use public names as their types allow; pyright fails where an ignored error is none."""
    emptied: EmptyCache = EmptyCache(every_n_steps=5)
    assert_type(emptied.every_n_steps, int)
    assert_type(gemm(torch.ones(2, 3), torch.ones(3, 4)), torch.Tensor)
    rows, targets = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    assert_type(token_logprobs(rows, rows, targets), torch.Tensor)
    assert_type(token_logprobs(rows, rows, targets, with_entropy=True), tuple[torch.Tensor, torch.Tensor])
    layer: nn.Module = TritonLinear(8, 8)
    ExactGradient(layer, micro_batch_size=2)
    assert_type(lightning_eff.__version__, str)
    EmptyCache(every=5)  # pyright: ignore[reportCallIssue]
