"""Find every technique by its name, and train the plain loop that it must equal."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

import lightning_eff
from tests.support.models import Deep, make_loader

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_eff"
TECHNIQUES = [
    f"{folder}/{file.stem}"
    for folder in lightning_eff.TECHNIQUE_FOLDERS
    for file in sorted((PACKAGE / folder).glob("[a-z]*.py"))
]
GROUP = {"models": "model", "data": "data"}


def yaml_of(name: str) -> Path:
    folder, _, stem = name.partition("/")
    return ROOT / "conf" / GROUP.get(folder, folder) / f"{stem}.yaml"


def class_of(name: str) -> type:
    """Return the class that a YAML's `_target_` names, which must lie in the module of the same name."""
    target = yaml.safe_load(yaml_of(name).read_text())["_target_"]
    module, _, attribute = target.rpartition(".")
    assert module == f"lightning_eff.{name.replace('/', '.')}"
    return getattr(importlib.import_module(module), attribute)


NUM_STEPS = 50
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def plain_loop(model: Deep, precision: str, num_steps: int = NUM_STEPS) -> list[float]:
    """Train with the loop of PyTorch's documentation, without Lightning: the independent reference."""
    dtype = torch.float16 if precision.startswith("16") else torch.bfloat16
    mixed = precision.endswith("-mixed")
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    dtype = torch.float64 if precision == "64-true" else dtype
    kept = dtype if precision.endswith("-true") and precision != "32-true" else None
    if kept is not None:
        model.to(kept)
    optimizer, losses = SGD(model.parameters()), list[float]()
    while len(losses) < num_steps:
        for batch, y in make_loader():
            x = batch.to(kept)
            with torch.autocast("cpu", dtype=dtype, enabled=mixed):
                logits = model(x)
                loss = F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
            if len(losses) == num_steps:
                break
    return losses[:num_steps]


def assert_equal(model: Deep, plain: Deep, expected: list[float], rtol: float) -> None:
    if rtol == 0.0:
        assert model.losses == expected
    assert model.losses == pytest.approx(expected, rel=rtol)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=rtol, atol=rtol * 0.1)
