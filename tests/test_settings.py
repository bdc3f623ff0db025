"""Sizes of models and data, and settings of functions for other loops, are checked where they are given.

Settings of techniques, and techniques that change nothing, are in tests/messages.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.callbacks.tiled_conv import tile_convs
from lightning_eff.callbacks.tiled_loss import tile_loss
from lightning_eff.callbacks.tiled_mlp import tile_mlps
from lightning_eff.callbacks.triton_gemm import swap
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.data.digits import Digits
from lightning_eff.data.python_source import PythonSource
from lightning_eff.data.shapes import Shapes
from lightning_eff.models.cnn import CNN
from lightning_eff.models.gpt import GPT
from lightning_eff.models.hf_causal_lm import HFCausalLM

SIZES = {"vocab_size": 37, "context_length": 12, "d_model": 16, "num_layers": 2, "num_heads": 2}
LANGUAGE = functools.partial(GPT, **SIZES)
HUB = functools.partial(HFCausalLM, name="unread")

IMAGES = ("image_size", "num_train_images", "num_val_images", "num_shapes", "batch_size")
SIZES_OF: list[tuple[Callable[..., object], str, Any]] = [
    *((kind, "num_workers", -1) for kind in (Digits, Shapes, PythonSource)),
    *((Digits, "batch_size", 0), (Digits, "val_fraction", 0.0), (Digits, "val_fraction", 1.0)),
    *((Shapes, key, 0) for key in IMAGES),
    *((PythonSource, key, 0) for key in ("context_length", "batch_size")),
    *((PythonSource, "vocab_size", 256), (PythonSource, "vocab_size", 65_537)),
    *((PythonSource, "val_fraction", 0.0), (PythonSource, "source_dir", "nowhere")),
    *((LANGUAGE, name, 0) for name in SIZES),
    *((LANGUAGE, "d_model", 18), (LANGUAGE, "dropout", 1.0), (HUB, "vocab_size", 0)),
    *((CNN, name, 0) for name in ("in_channels", "num_classes", "channels", "num_blocks")),
]


@pytest.mark.parametrize(("make", "key", "value"), SIZES_OF)
def test_a_wrong_size_is_rejected_by_its_name(make: Callable[..., object], key: str, value: object) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{key}={value!r}"):
        make(**{key: value})


CHANGES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (tile_loss, {"tile_budget_mib": "big"}, "tile_budget_mib='big'"),
    (tile_mlps, {"min_tokens": 0}, "min_tokens=0"),
    (tile_convs, {"min_pixels": 0}, "min_pixels=0"),
    (swap, {"min_features": 0}, "min_features=0"),
]


@pytest.mark.parametrize(("change", "arguments", "text"), CHANGES)
def test_functions_for_other_loops_check_and_warn_as_the_callbacks(
    change: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        change(torch.nn.Linear(2, 2), **arguments)
    with pytest.warns(NoEffectWarning) as caught:
        assert change(torch.nn.Linear(2, 2)) == {}
    assert [each.filename for each in caught] == [__file__]
