"""TextLosses: means over the same windows before and after, and nothing of the run changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.data.python_prose import PythonProse
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.text_losses import TextLosses
from tests.support.models import Net, make_loader, make_trainer


def fit(text_cache: Path, folder: Path, *monitors: TextLosses) -> tuple[GPT, PythonProse]:
    torch.manual_seed(0)
    model = GPT(vocab_size=300, context_length=16, d_model=16, num_layers=1, num_heads=2, dropout=0.5)
    sizes: dict[str, Any] = {"vocab_size": 300, "context_length": 16, "micro_batch_size": 2}
    data = PythonProse(**sizes, source_dir=str(text_cache), cache_dir=str(folder))
    make_trainer(callbacks=list(monitors), max_steps=3, limit_val_batches=1).fit(model, datamodule=data)
    return model, data


def test_losses_are_means_over_the_first_windows(
    text_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = TextLosses(max_batches=2)
    with caplog.at_level(logging.INFO):
        logging.getLogger("lightning.pytorch").propagate = True
        model, data = fit(text_cache, tmp_path, monitor)
    model.eval()
    for name, loader in data.texts().items():
        batches = iter(loader)
        with torch.no_grad():
            losses = [float(model.loss(model(x), y)) for x, y in (next(batches), next(batches))]
        assert monitor.after[name] == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert monitor.after[name] != monitor.before[name]
    line = next(text for text in caplog.messages if text.startswith("Nats per token, before -> after"))
    assert f"prose {monitor.before['prose']:.3f} -> {monitor.after['prose']:.3f}" in line


def test_the_run_is_the_same_to_the_bit(text_cache: Path, tmp_path: Path) -> None:
    with_it, _ = fit(text_cache, tmp_path, TextLosses(max_batches=3))
    without, _ = fit(text_cache, tmp_path)
    assert with_it.training is without.training
    for ours, theirs in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_has_no_texts_is_refused_with_the_remedy(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match=r"texts\(\)") as caught:
        make_trainer(callbacks=[TextLosses()]).fit(net(), make_loader())
    assert caught.value.remedies == ("~monitors.text_losses",)
    with pytest.raises(ConfigError, match="max_batches=0: expected a whole number of at least 1"):
        TextLosses(max_batches=0)
