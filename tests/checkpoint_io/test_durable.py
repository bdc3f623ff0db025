"""Durable in a Trainer and under Fabric: resuming, removal, hostile files, asynchronous saves."""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import OmegaConf

from lightning_eff.checkpoint import atomic_write
from lightning_eff.checkpoint.stored_weights import newest_valid
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core import rules
from lightning_eff.core.errors import CheckpointError, CheckpointWarning
from lightning_eff.core.technique import Verdict
from tests.support.models import Net, make_loader, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


def fit(
    folder: Path, model: Net, io: Any, *, max_steps: int = 12, resume: Any = None, **keywords: Any
) -> ModelCheckpoint:
    saver = ModelCheckpoint(
        **{"dirpath": folder, "monitor": "train_loss", "save_top_k": 2, "save_last": True}
        | {"every_n_train_steps": 2, "filename": "{step}"}
        | keywords
    )
    keywords = {"enable_checkpointing": True, "max_steps": max_steps, "default_root_dir": folder}
    trainer = make_trainer(plugins=[io], callbacks=[saver], **keywords)
    trainer.fit(model, make_loader(), ckpt_path=resume)
    return saver


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("save_last", "asynchronous"), [(True, True), ("link", False)])
def test_a_run_with_top_k_and_last_resumes_to_the_same_bits(
    save_last: Any, asynchronous: bool, net: Callable[..., Net], tmp_path: Path
) -> None:
    # Lightning's link leads to the last of the top k, which is the last step's without a monitor.
    kept: dict[str, Any] = {"save_last": save_last}
    kept |= {"monitor": None, "save_top_k": 1} if save_last == "link" else {}
    whole, first, second, stock = (net(dropout=0.0) for _ in range(4))
    fit(tmp_path / "whole", whole, Durable(), max_steps=20, **kept)
    io = Durable(asynchronous=asynchronous)
    saver = fit(tmp_path / "run", first, io, max_steps=10, **kept)
    assert len(names(tmp_path / "run")) == (2 if save_last == "link" else 3)
    assert (tmp_path / "run" / "last.ckpt").is_symlink() == (save_last == "link")
    assert saver.best_model_path in {str(tmp_path / "run" / name) for name in names(tmp_path / "run")}
    assert io.outcome().numbers["num_removed"] > 0
    again = Durable(asynchronous=asynchronous)
    fit(tmp_path / "run", second, again, max_steps=20, resume=tmp_path / "run" / "last.ckpt", **kept)
    assert first.losses + second.losses == whole.losses
    assert torch.equal(second.first.weight, whole.first.weight)
    assert not torch.equal(second.first.weight, first.first.weight)
    assert again.outcome().numbers["num_verified"] == 1
    assert len([name for name in names(tmp_path / "run") if name.startswith("step")]) <= 3
    for path in (tmp_path / "run").iterdir():
        Durable().load_checkpoint(path)
    fit(tmp_path / "stock", stock, TorchCheckpointIO(), max_steps=20, **kept)
    assert names(tmp_path / "stock") == names(tmp_path / "whole"), "top-k keeps the same ones as stock"


def test_a_save_after_the_run_and_weights_only(net: Callable[..., Net], tmp_path: Path) -> None:
    io = Durable(asynchronous=True)
    trainer = make_trainer(plugins=[io], max_steps=2)
    trainer.fit(net(), make_loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in Durable().load_checkpoint(tmp_path / "weights.ckpt")


class Breaks(Net):
    """Its loss becomes NaN at a step; two buffers are not finite on purpose."""

    breaks_at, make_optimizer = 100, torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
        self.register_buffer("lowest", torch.tensor(torch.inf))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.lowest = torch.full_like(self.lowest, torch.inf if self.global_step > 4 else 1.0)
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_step >= self.breaks_at else loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=0.01)


def assert_finite(folder: Path) -> None:
    for path in folder.glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for name, value in state.items() if "." in name), path


@pytest.mark.parametrize(
    ("breaks_at", "keywords", "left"),
    [
        (5, {"save_top_k": 1, "monitor": None, "save_on_exception": True}, ["last.ckpt", "step=4.ckpt"]),
        (0, {}, []),
    ],
)
def test_no_checkpoint_has_weights_that_are_not_finite(
    breaks_at: int, keywords: dict[str, Any], left: list[str], tmp_path: Path
) -> None:
    model = Breaks()
    model.breaks_at = breaks_at
    good = r"last finite checkpoint is .*step=4\.ckpt|last\.ckpt" if left else "none was saved before"
    with pytest.raises(CheckpointError, match=rf"first\.weight.* not finite; .*({good})"):
        fit(tmp_path, model, Durable(asynchronous=breaks_at == 0), **keywords)
    assert names(tmp_path) == left
    assert_finite(tmp_path)


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`", "ignore::lightning_eff.core.errors.NoEffectWarning"
)
def test_a_resumed_run_keeps_the_checkpoint_that_it_began_from(tmp_path: Path) -> None:
    """Buffers that were not finite before may stay so; a scalar may become infinite."""
    model, broken = Breaks(), Breaks()
    for each in (model, broken):
        each.make_optimizer = torch.optim.SGD  # it has no state
    fit(tmp_path, model, Durable(), max_steps=8, monitor=None, save_top_k=1, save_last=False)
    broken.breaks_at, path = 9, tmp_path / "step=8.ckpt"
    with pytest.raises(CheckpointError, match=r"not finite; the last finite checkpoint is .*step=8\.ckpt"):
        fit(tmp_path, broken, Durable(), resume=path, monitor=None, save_top_k=1, save_last=False)
    assert names(tmp_path) == ["step=8.ckpt"]


def hostile(path: Path, victim: str) -> Path:
    """Make a checkpoint name a victim as the worst of its top k, with a correct digest."""
    state = torch.load(path, weights_only=True)
    (key,) = [key for key in state["callbacks"] if key.startswith("ModelCheckpoint")]
    worst = {f"{state['callbacks'][key]['dirpath']}/{victim}": torch.tensor(float("inf"))}
    state["callbacks"][key] |= {
        "best_k_models": worst,
        "kth_best_model_path": next(iter(worst)),
        "kth_value": torch.tensor(float("inf")),
    }
    Durable().save_checkpoint(state, path)
    return path


def test_a_checkpoint_cannot_choose_what_is_deleted(net: Callable[..., Net], tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "precious" / "thesis.txt"
    fit(run, net(), Durable(), max_steps=4, save_top_k=1)
    victim.parent.mkdir()
    victim.write_text("mine")
    path = hostile(run / "last.ckpt", "../precious")
    io = Durable()
    with pytest.warns(CheckpointWarning, match="precious is not removed"):
        fit(run, net(), io, max_steps=8, save_top_k=1, save_last=None, resume=path)
    assert io.outcome().numbers["num_kept"] == 1
    assert victim.exists()
    fit(run, net(), TorchCheckpointIO(), max_steps=8, save_top_k=1, save_last=None, resume=path)
    assert not victim.exists(), "negative control: stock Lightning removes it"


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    io, other = Durable(), Durable()
    for name in ("a", "b"):
        io.save_checkpoint({"x": 1}, tmp_path / f"{name}.ckpt")
    TorchCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "stock.ckpt")
    (tmp_path / "link.ckpt").symlink_to("b.ckpt")
    (tmp_path / "out.ckpt").symlink_to("/etc/hostname")
    with pytest.warns(CheckpointWarning, match="a.ckpt is not removed"):
        other.remove_checkpoint(tmp_path / "a.ckpt")
    for name in ("stock.ckpt", "out.ckpt"):
        with pytest.warns(CheckpointWarning, match=f"{name} is not removed"):
            io.remove_checkpoint(tmp_path / name)
    io.remove_checkpoint(tmp_path / "link.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "never.ckpt")
    assert names(tmp_path) == ["b.ckpt", "out.ckpt", "stock.ckpt"]
    with pytest.warns(CheckpointWarning, match="has no SHA-256"):
        io.load_checkpoint(tmp_path / "stock.ckpt")
    with pytest.warns(CheckpointWarning, match="is not removed"):
        io.remove_checkpoint(tmp_path / "stock.ckpt")
    assert other.load_checkpoint(tmp_path / "b.ckpt")
    other.remove_checkpoint(tmp_path / "b.ckpt")  # as a parent process does with its child's weights
    assert names(tmp_path) == ["out.ckpt", "stock.ckpt"]


class Held:
    """Hold every write back until `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = atomic_write.atomic_replace

        def late(path: Path) -> Any:
            assert self.go.wait(20)
            return write(path)

        patch.setattr(atomic_write, "atomic_replace", late)


def test_an_asynchronous_save_has_the_state_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, io = Held(monkeypatch), Durable(asynchronous=True)
    weight = torch.ones(1000)
    state = {"weight": weight, "view": weight[:10], "list": [1], "metrics": {"loss": torch.ones(1)}}
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    weight.zero_()
    state["list"].append(2)
    state["metrics"]["loss"] += 1
    state["late"] = True
    assert not (tmp_path / "a.ckpt").exists()
    held.go.set()
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")
    assert loaded["weight"].sum() == 1000
    assert loaded["view"].sum() == 10
    assert loaded["view"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()
    assert (loaded["list"], float(loaded["metrics"]["loss"]), len(loaded)) == ([1], 1.0, 4)
    io.teardown()


def test_a_removal_waits_for_the_save_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = Durable(asynchronous=True)
    io.save_checkpoint({"x": 1}, tmp_path / "old.ckpt")
    io.load_checkpoint(tmp_path / "old.ckpt")
    held = Held(monkeypatch)
    io.save_checkpoint({"x": 2}, tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert names(tmp_path) == ["old.ckpt"]
    held.go.set()
    io.teardown()
    assert names(tmp_path) == ["new.ckpt"]


@pytest.mark.parametrize("waits", ["save", "end"])
def test_an_error_in_the_thread_is_raised_once_at_the_next_save_or_end(waits: str, tmp_path: Path) -> None:
    io = Durable(asynchronous=True)
    io.save_checkpoint({"x": 1}, tmp_path / "old.ckpt")
    (tmp_path / "taken").mkdir()
    io.save_checkpoint({"x": 2}, tmp_path / "taken")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match="taken"):
        io.save_checkpoint({"x": 3}, tmp_path / "new.ckpt") if waits == "save" else io.teardown()
    assert Durable().load_checkpoint(tmp_path / "old.ckpt") == {"x": 1}, "removed though the new one failed"
    io.teardown()
    io.save_checkpoint({"x": 4}, tmp_path / "new.ckpt")
    io.teardown()
    assert (tmp_path / "new.ckpt").exists()


def test_under_fabric(tmp_path: Path) -> None:
    io = Durable(asynchronous=True)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    layer = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    expected = layer.weight.detach().clone()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 7})
    torch.nn.init.zeros_(layer.weight)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "a.ckpt", state)
    assert torch.equal(layer.weight, expected)
    assert state["step"] == 7
    assert io.outcome().numbers["num_verified"] == 1
    io.teardown()


def test_unsupported_requests_are_rejected(tmp_path: Path) -> None:
    io = Durable()
    for do in (io.load_checkpoint, io.remove_checkpoint, lambda path: io.save_checkpoint({}, path)):
        with pytest.raises(CheckpointError, match="s3://"):
            do("s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="storage_options='x'"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options="x")
    with pytest.raises(AttributeError, match=r"Can't (get local|pickle local)|not pickle"):
        io.save_checkpoint({"f": lambda: 0}, tmp_path / "a.ckpt")
    assert names(tmp_path) == []
    from lightning.pytorch.strategies import FSDPStrategy

    findings = rules.check_rules([io, FSDPStrategy], {})
    assert [finding.rule.verdict for finding in findings] == [Verdict.WARNED]


def save_runs(root: Path, *runs: tuple[str, int | None]) -> list[Path]:
    """Save a checkpoint of each run and step, with file times in the opposite order."""
    paths = [root / name / "checkpoints" / f"step-{step}.ckpt" for name, step in runs]
    for age, (path, (_, step)) in enumerate(zip(paths, runs, strict=True)):
        Durable().save_checkpoint({} if step is None else {"global_step": step}, path)
        os.utime(path, (2e9 - age, 2e9 - age))
    return paths


EARLY, LATE = "2026-11-27_01-02-03-000004", "2026-11-27_01-02-03-000005"


@pytest.mark.parametrize(
    "runs",
    [
        [(EARLY, 9), (LATE, 5)],  # the later run began again
        [(f"sweep_{EARLY}/9", 9), (f"sweep_{EARLY}/10", 5)],
        [("mine", step) for step in (None, 3, 9, 20, 100)],
    ],
)
def test_the_newest_checkpoint_is_the_greatest_step_of_the_last_run(
    runs: list[tuple[str, int | None]], tmp_path: Path
) -> None:
    wanted = save_runs(tmp_path, *runs)[-1]
    assert newest_valid(tmp_path) == wanted


def test_links_and_damaged_files_are_not_the_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, newest = save_runs(tmp_path, *(("run", step) for step in (1, 2, 3)))
    old.with_name("gone.ckpt").symlink_to("nothing.ckpt")
    old.with_name("last.ckpt").symlink_to(newest.name)
    assert newest_valid(tmp_path) == newest
    assert caplog.messages == []
    for path in (new, newest):
        path.write_bytes(path.read_bytes()[:-100])
    assert newest_valid(tmp_path) == old
    assert f"{newest} is not loaded" in caplog.messages[0]
    old.unlink()
    assert newest_valid(tmp_path) is None


class Color(Enum):
    RED = "red"


@dataclass
class Size:
    width: int
    act: Any = None


def interpolated() -> Any:
    return OmegaConf.create({"a": {"b": 2}, "c": "${a.b}", "gone": "${nothing}"})


PLAIN: list[tuple[Any, Any]] = [
    (Path("a/b"), "a/b"),
    (Color.RED, "red"),
    (np.float64(0.5), 0.5),
    (np.arange(2), [0, 1]),
    (Namespace(lr=np.float32(0.5), of=(Path("a"), Color.RED)), {"lr": 0.5, "of": ("a", "red")}),
    (OmegaConf.create([1, {"a": 2}]), [1, {"a": 2}]),
    (torch.float16, torch.float16),
]
LEFT_OUT: list[tuple[Any, dict[str, Any], str]] = [
    (partial(torch.optim.Adam, lr=0.1), {}, "net"),
    ({"width": 4, "act": torch.nn.ReLU}, {"net": {"width": 4}}, "net.act"),
    (Size(3, act=torch.relu), {"net": {"width": 3}}, "net.act"),
    (interpolated(), {"net": {"a": {"b": 2}, "c": 2}}, "net.gone"),
    ({"api_token": "x", "eos_token": "</s>"}, {"net": {"eos_token": "</s>"}}, "net.api_token"),
]


@pytest.mark.parametrize(("given", "plain"), PLAIN)
def test_hyperparameters_are_stored_as_plain_values(given: Any, plain: Any, tmp_path: Path) -> None:
    saved = {"hyper_parameters": {"net": given}, "datamodule_hyper_parameters": {"net": given}}
    Durable().save_checkpoint(saved, tmp_path / "one.ckpt")
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert loaded == {"hyper_parameters": {"net": plain}, "datamodule_hyper_parameters": {"net": plain}}
    assert type(loaded["hyper_parameters"]["net"]) is type(plain)
    assert saved["hyper_parameters"]["net"] is given


@pytest.mark.parametrize(("given", "plain", "name"), LEFT_OUT)
def test_hyperparameters_without_a_plain_value_are_left_out_by_name(
    given: Any, plain: dict[str, Any], name: str, tmp_path: Path
) -> None:
    io = Durable()
    with pytest.warns(CheckpointWarning, match=rf"{name}\. ") as warned:
        io.save_checkpoint({"hyper_parameters": {"net": given, "depth": 2}}, tmp_path / "one.ckpt")
    assert io.load_checkpoint(tmp_path / "one.ckpt") == {"hyper_parameters": plain | {"depth": 2}}
    assert len(warned) == 1


def test_the_first_checkpoint_that_cannot_be_loaded_again_is_reported(tmp_path: Path) -> None:
    io, saved = Durable(), {"callbacks": {"Mine": {"best": np.float64(0.5)}}}
    with pytest.warns(CheckpointWarning, match=r"one\.ckpt cannot be loaded again: it holds a .*scalar"):
        io.save_checkpoint(saved, tmp_path / "one.ckpt")
    io.save_checkpoint(saved, tmp_path / "two.ckpt")
