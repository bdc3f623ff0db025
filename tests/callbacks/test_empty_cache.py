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


@pytest.mark.parametrize(
    ("every", "accumulate", "steps", "emptied"), [(3, 1, 10, [3, 6, 9]), (2, 5, 5, [2, 4])]
)
def test_empties_once_per_n_optimizer_steps(
    every: int,
    accumulate: int,
    steps: int,
    emptied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, callback, seen = Net(), EmptyCache(every_n_steps=every), list[int]()
    monkeypatch.setattr(
        empty_cache, "release", lambda _: seen.append(model.global_step) or Released(5, 0.001)
    )
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(model, callback, accumulate_grad_batches=accumulate, max_steps=steps, logger=logger)
    assert seen == emptied
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    logged = {int(row["step"]): row for row in rows if row["eff/empty_cache_ms"]}
    assert list(logged) == emptied
    assert {
        (row["eff/empty_cache_returned_bytes"], row["eff/empty_cache_ms"]) for row in logged.values()
    } == {("5.0", "1.0")}
    assert not {"eff/empty_cache_ms", "eff/empty_cache_returned_bytes"} & trainer.callback_metrics.keys(), (
        "Lightning would collect them after each batch from then on"
    )
    times, num_bytes = len(emptied), 5 * len(emptied)
    assert callback.outcome().did == f"emptied {times} times, returned {num_bytes} B in {times} ms"
    assert callback.outcome().numbers["returned_bytes"] == num_bytes


def test_a_device_without_a_cache_warns(net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "has_cache", lambda device: False)
    with pytest.warns(NoEffectWarning, match="the allocator of cpu has no cache"):
        fit(net(), EmptyCache(every_n_steps=1), max_steps=2)
    with pytest.raises(ValueError, match="has no cache to empty"):
        release("cpu")


@pytest.mark.skipif(not allocator.has_cache(torch.device("cpu")), reason="needs glibc's malloc_trim")
def test_freed_heap_goes_back_to_the_operating_system() -> None:
    # Blocks below glibc's mmap threshold stay in its heap, and a live one above them keeps it from shrinking.
    release("cpu")
    blocks = [torch.ones(16 * 1024) for _ in range(2000)]
    keep = blocks[-1]
    del blocks
    assert release("cpu").returned_bytes > 32 * 2**20
    assert float(keep.sum()) == 16 * 1024
