"""What a user's type checker sees of the public names; pyright reads this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import lightning_eff
from lightning_eff import EmptyCache, ExactGradient, TritonLinear, gemm, recompute, release

emptied: EmptyCache = EmptyCache(every_n_steps=5)
assert_type(emptied.every_n_steps, int | None)
assert_type(gemm(torch.ones(2, 3), torch.ones(3, 4)), torch.Tensor)
layer: nn.Module = TritonLinear(8, 8)
assert_type(lightning_eff.__version__, str)
EmptyCache(every=5)  # pyright: ignore[reportCallIssue]
USED = (ExactGradient, recompute, release)
