"""The prediction matches the measurement to the byte in every phase: 40 combinations of techniques."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.float8 import Float8
from tests.support.prediction import CNN_OF, GPT_OF, Encoder, Llama, assert_predicted_is_measured, choice

Plugins = dict[str, Any]
STEPS: dict[str, Callable[[], Plugins]] = {
    "whole batches": dict,
    "accumulation": lambda: {"callbacks": [GradientAccumulation(global_batch_size=8)]},
    "lightning's accumulation": lambda: {"accumulate_grad_batches": 2},
    "micro-batches": lambda: {"callbacks": [MicroBatch(micro_batch_size=2)]},
    "both": lambda: {
        "callbacks": [GradientAccumulation(global_batch_size=8), MicroBatch(micro_batch_size=2)]
    },
}
RECOMPUTING: dict[str, Callable[[], Plugins]] = {
    "kept": dict,
    "full": lambda: {"callbacks": [GradientCheckpointing()]},
    "every second": lambda: {"callbacks": [GradientCheckpointing(policy="every_n")]},
    "selective": lambda: {"callbacks": [GradientCheckpointing(policy="selective")]},
    "offload": lambda: {"callbacks": [GradientCheckpointing(policy="offload")]},
}
PRECISIONS: dict[str, Callable[[], Plugins]] = {
    "fp32": dict,
    "bf16-mixed": lambda: {"plugins": [AutoPrecision(precision="bf16-mixed")]},
    "bf16-true": lambda: {"plugins": [AutoPrecision(precision="bf16-true")]},
    "float8": lambda: {"plugins": [Float8(emulate=True)]},
    "lightning's bf16": lambda: {"precision": "bf16-mixed"},
}
OPTIMIZERS: dict[str, Callable[[], Plugins]] = {
    "own": dict,
    "momentum": lambda: {"callbacks": [choice(functools.partial(torch.optim.SGD, momentum=0.9))]},
    "fused": lambda: {"callbacks": [choice(functools.partial(torch.optim.AdamW, fused=True))]},
    "in backward": lambda: {"callbacks": [choice(InBackward)]},
    "on the host": lambda: {"callbacks": [choice(CpuOffload)]},
}
CLIPPING: dict[str, Callable[[], Plugins]] = {"free": dict, "clipped": lambda: {"gradient_clip_val": 1.0}}
LOSSES: dict[str, Callable[[], Plugins]] = {
    "whole logits": dict,
    "tiled": lambda: {"callbacks": [TiledLoss(tile_budget_mib=1e-2)]},
}
FACTORS = (STEPS, RECOMPUTING, PRECISIONS, OPTIMIZERS, CLIPPING, LOSSES)
MODELS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Plugins]]] = {
    "gpt": (functools.partial(GPT_OF, tie_word_embeddings=False, dropout=0.1), dict),
    "tied": (GPT_OF, dict),
    "batch norm": (CNN_OF, dict),
    "dropout": (Encoder, dict),
    "llama": (Llama, dict),
    "lora": (GPT_OF, lambda: {"callbacks": [PeftAdapter()]}),
}


def _allowed(names: tuple[str, ...]) -> bool:
    """Return whether the options can be combined.

    An optimizer step in the backward pass needs full gradients, without clipping.

    Lightning's mixed precision cannot clip gradients of a fused optimizer.
    """
    steps, _, precision, optimizer, clipping, _ = names
    if (precision, optimizer, clipping) == ("lightning's bf16", "fused", "clipped"):
        return False
    return optimizer != "in backward" or (steps == "whole batches" and clipping == "free")


def _combinations(count: int) -> list[tuple[str, ...]]:
    """Return combinations in which as many pairs of options as possible occur as early as possible."""
    left = [names for names in itertools.product(*FACTORS) if _allowed(names)]
    random.Random(0).shuffle(left)
    met: set[tuple[tuple[int, str], ...]] = set()
    found: list[tuple[str, ...]] = []
    for _ in range(count):
        best = max(left, key=lambda names: len(_pairs(names) - met))
        left.remove(best)
        met |= _pairs(best)
        found.append(best)
    return found


def _pairs(names: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(names), 2))


COMBINATIONS = _combinations(40)
QUICK = 6
"""The first combinations, which have every option, are not slow."""
CASES = [
    pytest.param([*MODELS][index % len(MODELS)], names, marks=[] if index < QUICK else [pytest.mark.slow])
    for index, names in enumerate(COMBINATIONS)
]


def test_the_combinations_have_every_allowed_pair_and_the_quick_ones_every_option() -> None:
    met = set[Any]().union(*map(_pairs, COMBINATIONS))
    assert met == set[Any]().union(*(_pairs(n) for n in itertools.product(*FACTORS) if _allowed(n)))
    assert set(itertools.chain(*COMBINATIONS[:QUICK])) == set(itertools.chain(*FACTORS))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::lightning_eff.core.errors.NoEffectWarning")
@pytest.mark.parametrize(("model", "names"), CASES)
def test_the_prediction_matches_the_measurement_in_every_phase(
    model: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    make, own = MODELS[model]

    def plugins() -> Plugins:
        merged: Plugins = {}
        for given in (own(), *(factor[name]() for factor, name in zip(FACTORS, names, strict=True))):
            callbacks = [*merged.get("callbacks", []), *given.get("callbacks", [])]
            merged |= {**given, "callbacks": callbacks}
        return merged

    assert_predicted_is_measured(make, plugins, tmp_path)
