"""Mark tests that need at least torch 2.13."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
since_torch_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13")
