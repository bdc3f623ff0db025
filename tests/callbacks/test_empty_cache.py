"""EmptyCache: every n optimizer steps, on every kind of device."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_eff.callbacks import empty_cache
from lightning_eff.callbacks.empty_cache import EmptyCache, Released, release
from lightning_eff.core import allocator
from lightning_eff.core.errors import NoEffectWarning
from tests.support.models import Net, fit


def test_empties_once_per_n_optimizer_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, callback, seen = Net(), EmptyCache(every_n_steps=2), list[int]()
    monkeypatch.setattr(
        empty_cache, "release", lambda _: seen.append(model.global_step) or Released(5, 0.001)
    )
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(model, callback, accumulate_grad_batches=5, max_steps=5, logger=logger)
    assert seen == [2, 4]
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    names = ("step", "eff/empty_cache_returned_bytes", "eff/empty_cache_ms")
    logged = [tuple(row[name] for name in names) for row in rows if row["eff/empty_cache_ms"]]
    assert logged == [("2", "5.0", "1.0"), ("4", "5.0", "1.0")]
    assert not {*names} & trainer.callback_metrics.keys(), "Lightning would collect them after each batch"
    assert callback.outcome().did == "emptied 2 times, returned 10 B in 2 ms"
    assert callback.outcome().numbers["returned_bytes"] == 10


def test_a_device_without_a_cache_warns(net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "has_cache", lambda device: False)
    with pytest.warns(NoEffectWarning, match="no cache"):
        fit(net(), EmptyCache(every_n_steps=1), max_steps=2)
    with pytest.raises(ValueError, match="has no cache to empty"):
        release("cpu")


@pytest.mark.skipif(not allocator.has_cache(torch.device("cpu")), reason="needs glibc's malloc_trim")
def test_freed_heap_memory_returns_to_the_operating_system() -> None:
    # Blocks below glibc's mmap threshold stay in its heap, and a live one above them keeps it from shrinking.
    release("cpu")
    blocks = [torch.ones(16 * 1024) for _ in range(2000)]
    keep = blocks[-1]
    del blocks
    assert release("cpu").returned_bytes > 32 * 2**20
    assert float(keep.sum()) == 16 * 1024
