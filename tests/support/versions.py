"""Tests that need the torch of our own CI: another one lacks what they look at, or has it otherwise."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
since_torch_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.13 has it, or has it otherwise")
