"""EfficiencyReport: the ledger, exact counts, failed runs, files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.checkpoint import atomic_io
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.catalog import LEDGER_FILE
from lightning_eff.core.errors import ConfigError
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.files import PAGE_FILE, SNAPSHOT_FILE, read_baseline
from tests.support.models import Layer, Net, make_loader, make_trainer


def fit(model: Net, folder: Path, *extra: Any, **keywords: Any) -> dict[str, Any]:
    report = EfficiencyReport(dirpath=folder)
    trainer = make_trainer(callbacks=[*extra, report], **keywords)
    trainer.fit(model, make_loader(), make_loader(4))
    return report.report


def test_ledger_says_asked_applied_and_done(net: Callable[..., Net], tmp_path: Path) -> None:
    class Mine(EmptyCache):
        """A technique of the user's, named by its class."""

    monitor = EfficiencyReport(dirpath=tmp_path)
    callbacks = [EmptyCache(every_n_steps=4), Mine(every_n_steps=4), monitor]
    make_trainer(callbacks=callbacks, plugins=[AutoPrecision()]).fit(net(), make_loader())
    names = ["precision/auto", "callbacks/empty_cache", "Mine"]
    assert [row["technique"] for row in monitor.report["ledger"]] == names
    precision, cache = map(monitor.outcome_of, ("precision/auto", "callbacks/empty_cache"))
    assert precision["asked"]["precision"] == "auto"
    assert precision["numbers"]["precision"] in ("32-true", "bf16-mixed")
    assert (cache["status"], cache["numbers"]["times"]) == ("applied", 2)
    assert (precision["exact"], cache["exact"]) == (False, True)
    with pytest.raises(KeyError, match="did you mean 'callbacks/empty_cache'"):
        monitor.outcome_of("empty_cache")


def test_figures_are_counted_exactly(net: Callable[..., Net], tmp_path: Path) -> None:
    model = net(width=4096)
    report = fit(model, tmp_path / "a" / "b")
    measured = report["measured"]
    # Forward, weight gradient and input gradient of both layers; the first layer's input needs no gradient.
    assert measured["flops_per_sample"] == 2 * 8 * 4096 * 2 + 2 * 4096 * 3 * 3
    # Ten batches: two are counted, two warm up, six are timed.
    assert measured["num_batches"] == 6
    assert measured["samples_per_s"] > 0
    assert 0.0 <= measured["data_wait_share"] <= 1.0
    assert measured["tokens_per_s"] is None
    assert measured["peak_bytes"] >= 3 * sum(p.numel() * 4 for p in model.parameters()), "with momentum"
    again = fit(net(width=4096), tmp_path)["measured"]
    assert again["peak_bytes"] == measured["peak_bytes"], "live bytes are the same in every run"
    assert json.loads((tmp_path / "a" / "b" / LEDGER_FILE).read_text()) == report
    page = (tmp_path / "a" / "b" / PAGE_FILE).read_text()
    assert "<title>Net, run b</title>" in page
    assert "http" not in page.replace("http-equiv", "")


class Fails(Net):
    error: type[BaseException] = RuntimeError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 5:
            raise self.error("the label is missing")
        return super().training_step(batch, batch_idx)


def test_an_interrupted_run_has_advice(tmp_path: Path) -> None:
    model = Fails()
    model.error = KeyboardInterrupt
    with pytest.raises(SystemExit):
        fit(model, tmp_path)
    report = json.loads((tmp_path / LEDGER_FILE).read_text())
    assert (report["status"], report["reason"]) == ("stopped", "interrupted")
    assert "callbacks/micro_batch" in [row["technique"] for row in report["advice"]]


@pytest.mark.parametrize("fails", [True, False])
def test_a_checkpoint_that_is_saved_as_the_run_ends_is_in_the_report(
    fails: bool, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write = atomic_io.write_with_digest

    def slow(*arguments: Any) -> Any:
        """Write so slowly that a save in the background is not finished when the run ends."""
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(atomic_io, "write_with_digest", slow)
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=10)
    keywords = {"plugins": [Durable(asynchronous=True)], "enable_checkpointing": True}
    failure = pytest.raises(RuntimeError, match="the label is missing") if fails else nullcontext()
    with caplog.at_level("INFO"), failure:
        fit(Fails() if fails else Net(), tmp_path, saver, **keywords)
    (row,) = json.loads((tmp_path / LEDGER_FILE).read_text())["ledger"]
    assert (row["status"], row["numbers"]["num_saves"]) == ("applied", 1)
    (path,) = tmp_path.glob("*.ckpt")
    assert row["numbers"]["saved_bytes"] == path.stat().st_size
    printed = [record.getMessage() for record in caplog.records if "Efficiency report" in record.getMessage()]
    assert len(printed) == 1
    assert "saved once" in printed[0]


def test_a_failed_run_is_reported_when_its_last_checkpoint_fails_too(tmp_path: Path) -> None:
    class CannotSave(ModelCheckpoint):
        def on_exception(self, *_: Any) -> None:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fit(Fails(), tmp_path, CannotSave(tmp_path), enable_checkpointing=True)
    report = json.loads((tmp_path / LEDGER_FILE).read_text())
    assert (report["status"], report["num_steps"]) == ("failed", 5)
    assert report["reason"] == "RuntimeError: the label is missing"


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_is_timed_and_not_counted(tmp_path: Path) -> None:
    model = Net()
    model.dropout = torch.compile(Layer(16, 0.0), fullgraph=True, backend="eager")
    measured = fit(model, tmp_path)["measured"]
    assert measured["flops_per_sample"] is None
    assert measured["peak_bytes"] is None
    assert measured["num_batches"] > 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_without_a_step_left_says_why(tmp_path: Path) -> None:
    for ckpt_path, num_steps in ((None, 10), (tmp_path / "last.ckpt", 0)):
        saver = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=10)
        monitor = EfficiencyReport(dirpath=tmp_path)
        keywords: dict[str, Any] = {"max_epochs": 1, "max_steps": 99, "enable_checkpointing": True}
        trainer = make_trainer(callbacks=[saver, monitor], **keywords)
        trainer.fit(Net(), make_loader(), ckpt_path=ckpt_path)
        assert (monitor.report["num_steps"], monitor.report["reason"]) == (num_steps, "max_epochs=1 reached")


class Stops(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


def test_an_epoch_that_is_cut_short_is_not_the_last_one(tmp_path: Path) -> None:
    report = fit(Stops(), tmp_path, max_epochs=1, max_steps=-1)
    assert report["reason"] == "stopped early by trainer.should_stop"


class Validated(Net):
    def on_train_start(self) -> None:
        self.log("only_in_training", 3.0)


def test_curves_of_the_run_are_kept_by_step(tmp_path: Path) -> None:
    keywords = {"val_check_interval": 5, "max_steps": 20, "log_every_n_steps": 4}
    report = fit(Validated(lr=0.25), tmp_path, logger=CSVLogger(tmp_path), **keywords)
    series, validation = report["series"], report["validation"]
    assert series["learning_rate"] == [[step, 0.25] for step in range(1, 21)]
    assert [step for step, _ in series["gradient_norm"]] == [4, 8, 12, 16, 20]
    assert [step for step, _ in validation["val_loss"]] == [5, 10, 15, 20]
    assert validation["val_loss"][-1][1] == report["metrics"]["val_loss"]
    assert list(validation) == ["val_loss"], "what the training has logged is none of validation's"
    assert [batch for batch, _ in series["samples_per_s"]] == [*range(1, 14)], "seven are left out"
    assert series["held_bytes"][0][0] == 1


def test_a_run_is_compared_to_the_report_of_another_one(tmp_path: Path) -> None:
    fit(Net(), tmp_path / "one")
    monitor = EfficiencyReport(dirpath=tmp_path / "two", baseline=tmp_path / "one")
    make_trainer(callbacks=[monitor]).fit(Net(), make_loader())
    assert monitor.report["baseline"]["title"] == "Net, run one"
    assert "times as fast as the baseline" in (tmp_path / "two" / PAGE_FILE).read_text()
    assert monitor._repr_html_()
    assert read_baseline(str(tmp_path / "one" / LEDGER_FILE))["title"] == "Net, run one"


def test_a_baseline_that_is_not_there_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ("{}", "<"):
        other.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(str(other))):
            EfficiencyReport(baseline=other)
    with pytest.raises(ConfigError) as caught:
        EfficiencyReport(baseline=tmp_path / "none")
    assert caught.value.key == "baseline"
    assert EfficiencyReport()._repr_html_() is None


class OutOfMemory(Fails):
    error = torch.OutOfMemoryError


def test_out_of_memory_leaves_the_allocators_snapshot_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: torch.device, path: Path) -> bool:
        path.write_text("blocks")
        return True

    recorded: list[bool] = []
    record = "lightning_eff.core.allocator.record_history"
    monkeypatch.setattr(record, lambda _, *, is_on: recorded.append(is_on))
    monkeypatch.setattr("lightning_eff.core.allocator.write_snapshot", write)
    with pytest.raises(RuntimeError, match="the label is missing"):
        fit(Fails(), tmp_path)
    assert not (tmp_path / SNAPSHOT_FILE).exists()
    with pytest.raises(torch.OutOfMemoryError):
        fit(OutOfMemory(), tmp_path)
    assert (tmp_path / SNAPSHOT_FILE).read_text() == "blocks"
    assert json.loads((tmp_path / LEDGER_FILE).read_text())["memory_snapshot"] == SNAPSHOT_FILE
    assert recorded == [], "it slows a run down"
    monitor = EfficiencyReport(dirpath=tmp_path, record_memory_history=True)
    make_trainer(callbacks=[monitor]).fit(Net(), make_loader())
    assert recorded == [True, False]
