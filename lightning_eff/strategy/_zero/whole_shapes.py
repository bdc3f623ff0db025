"""Weights that were divided while the model was built, in their own shapes for who looks at these alone.

`deepspeed.zero.Init` leaves of each parameter an empty vector on every rank and notes what it was. Who puts
parameters in groups by their dimensions (matrices decay, vectors do not) would take all of them for vectors.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def whole_shapes(model: nn.Module) -> Generator[None]:
    """Give divided parameters their shapes, without memory: every element is the same zero.

    Args:
        model: Of which some parameters may have been divided by DeepSpeed; the others are left alone.
    """
    divided: list[Any] = [each for each in model.parameters() if hasattr(each, "ds_shape")]
    parts = [each.data for each in divided]
    for parameter in divided:
        parameter.data = parameter.data.new_zeros(1).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, part in zip(divided, parts, strict=True):
            parameter.data = part
