"""The table of attention backends: on a CPU it equals torch's own choice, on CUDA its source."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from lightning_eff.core.attention_backends import AttentionCall, choose

SHAPE = (2, 4, 16, 8)
NAMES = {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash"}


def operands(
    *, dtype: torch.dtype, heads: int, keys: int, value_size: int, axes: int, is_strided: bool
) -> list[torch.Tensor]:
    """Return query, key and value."""
    shapes = [SHAPE, (2, heads, keys, 8), (2, heads, keys, value_size)]
    tensors = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    if axes == 3:
        tensors = [tensor[:, 0] for tensor in tensors]
    return [t.mT.contiguous().mT if is_strided else t for t in tensors]


def grid():
    """Yield tensors and options of calls that torch accepts."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    kinds = ("none", "causal", "bool", "float", "3-D", "trained", "one row", "by sample")
    for dtype, kind, p, heads, keys, value_size in itertools.product(
        dtypes, kinds, (0.0, 0.1), (4, 2), (16, 24), (8, 4)
    ):
        for axes, is_strided in ((4, False), (3, False), (4, True)):
            if axes == 3 and heads != 4:
                continue
            q, k, v = operands(
                dtype=dtype, heads=heads, keys=keys, value_size=value_size, axes=axes, is_strided=is_strided
            )
            mask = {
                "bool": torch.ones(16, keys, dtype=torch.bool), "float": torch.zeros(16, keys, dtype=dtype),
                "3-D": torch.zeros(4 if axes == 4 else 2, 16, keys, dtype=dtype),
                "by sample": torch.ones(2, 1, 1, keys, dtype=torch.bool)[: 2 if axes == 4 else 1],
                "one row": torch.ones(1, keys, dtype=torch.bool),
                "trained": torch.zeros(16, keys, dtype=dtype, requires_grad=True),
            }.get(kind)  # fmt: skip
            options = {"dropout_p": p, "is_causal": kind == "causal", "enable_gqa": heads != 4}
            yield (q, k, v, mask), options


def test_the_choice_on_a_cpu_equals_torchs():
    wrong, counts = [], {"flash": 0, "math": 0}
    for tensors, options in grid():
        call = AttentionCall.of(*tensors, **options)
        found = choose(call, 0).backend
        theirs = torch._fused_sdp_choice(*tensors, **options)
        counts[found] += 1
        wrong += [] if found == NAMES[SDPBackend(theirs)] else [call]
    assert not wrong
    assert counts == {"flash": 72, "math": 888}


CALL = AttentionCall(query=SHAPE, key=SHAPE, value=SHAPE, dtype=torch.bfloat16)
LARGE = (2, 4, 16, 512)
"""Head size of Gemma."""
GROUPED = {"key": (2, 2, 16, 8), "value": (2, 2, 16, 8)}
LONGER = {"key": (2, 4, 24, 8), "value": (2, 4, 24, 8)}
NOT_HALF = "not half precision"


def sized(size: int, value_size: int | None = None) -> dict[str, Any]:
    """Return shapes with another head size."""
    shape = (2, 4, 16, size)
    return {"query": shape, "key": shape, "value": (2, 4, 16, value_size or size)}


# Arguments of the call, its backend on compute capability 8.0, 8.9 and 9.0 as sdp_utils.cpp gives it, and why
# flash does not take it.
ROWS = [
    ({}, "flash flash cudnn", ""),
    ({"mask": "causal"}, "flash flash cudnn", ""),
    ({"dropout": 0.1}, "flash flash flash", ""),  # check_cudnn_dropout
    ({"dropout": 0.125}, "flash flash cudnn", ""),
    ({"mask": "bool"}, "efficient efficient cudnn", "mask"),  # check_for_attn_mask
    ({"mask": "float", "mask_requires_grad": True}, "efficient efficient efficient", "mask"),
    (GROUPED, "flash flash cudnn", ""),
    (GROUPED | {"mask": "bool"}, "math math cudnn", "mask"),
    (GROUPED | {"enable_gqa": False}, "math math math", "number of heads"),
    ({"dtype": torch.float32}, "efficient efficient efficient", NOT_HALF),
    ({"dtype": torch.float64}, "math math math", NOT_HALF),
    (GROUPED | {"dtype": torch.float32}, "math math math", NOT_HALF),
    (sized(12), "flash flash flash", ""),  # flash pads to a multiple of 8, cuDNN rejects them
    (sized(12) | {"mask": "bool"}, "math math math", "mask"),
    (sized(192, 128), "efficient efficient cudnn", "head sizes differ"),
    (sized(208), "flash efficient flash", ""),  # flash has no backward for (192, 224] on 8.6 to 8.9
    (sized(208) | {"requires_grad": False}, "flash flash flash", ""),
    (sized(256) | {"dropout": 0.1}, "flash efficient flash", ""),
    (sized(512), "efficient efficient efficient", "head size > 256"),
    (
        {"query": LARGE, "key": (2, 1, 16, 512), "value": (2, 1, 16, 512)},
        "math math math",
        "head size > 256",
    ),
    (LONGER | {"mask": "causal"}, "efficient efficient cudnn", "causal, T != S"),
    ({"key": (2, 4, 1, 8), "value": (2, 4, 1, 8)}, "flash flash flash", ""),
    ({"is_strided": True}, "math math math", "strided last axis"),
    ({"query": SHAPE[1:], "key": SHAPE[1:], "value": SHAPE[1:]}, "math math math", "not 4-D"),
    ({"mask": "bool", "mask_shape": (2, 16, 16)}, "efficient efficient efficient", "mask"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "backends", "why_not_flash"), ROWS)
def test_rows_of_the_choice_on_cuda(changes: dict[str, Any], backends: str, why_not_flash: str):
    call = replace(CALL, **changes)
    choices = [choose(call, capability) for capability in (80, 89, 90)]
    assert " ".join(choice.backend for choice in choices) == backends
    assert choices[0].rejected.get("flash", "") == why_not_flash
    assert choose(call, 100).backend == choices[2].backend
