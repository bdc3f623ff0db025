"""ZeRO and FSDP2 on two ranks (gloo): the steps of one device, and checkpoints that any strategy loads.

Two processes are started once for each group of strategies. `main` runs in both, and the tests read the
results and checkpoints.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError, ConflictError
from lightning_eff.core.shards import full_tensor
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support import covering
from tests.support.logged import rows_of
from tests.support.models import make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks

OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "zero1": lambda: DeepSpeedZero(stage=1),
    "zero2": lambda: DeepSpeedZero(stage=2),
    "zero3": lambda: DeepSpeedZero(stage=3),
    "zero3_offload": lambda: DeepSpeedZero(stage=3, **OFFLOADED),
    "fsdp2": FSDP2,
    "fsdp2_offload": lambda: FSDP2(cpu_offload=True, sync_every_micro_batch=True),
    "sharded": lambda: FSDP2(checkpoints="sharded"),
}
# Each strategy loads the checkpoint of the strategy before it. All save the same content as DDP.
GROUPS = {
    "usual": ["ddp", "zero2", "fsdp2", "ddp"],
    "all": [*("ddp", "zero3", "fsdp2", "sharded", "fsdp2_offload", "zero1", "zero2", "zero3_offload", "ddp")],
}
QUICK_CASES = (2, 10)
"""Rows of `covering.COVERING` that the usual group trains: one of ZeRO, and one of FSDP2."""
TWO_RANKS: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False, "enable_checkpointing": False}


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stack(pl.LightningModule):
    """Blocks between tied tensors, a frozen layer, a batch norm and a buffer.

    AdamW trains it, or SGD with momentum if `rate` is 0. If `tied`, the head shares the embedding's weight.
    """

    def __init__(self, *, tied: bool = True, rate: float = 1e-2) -> None:
        super().__init__()
        self.rate = rate
        self.embedding, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.statistics = nn.BatchNorm1d(6)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3))
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x).mean(1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.statistics(self.frozen(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        x, y = batch
        return F.cross_entropy((self if batch_idx % 2 else self.logits)(x), y)  # with and without `forward`

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}]
        groups += [{"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
        if not self.rate:
            return torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        optimizer = torch.optim.AdamW(groups, lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tokens(num_samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 7, (num_samples, 5), generator=generator)
    return TensorDataset(x, torch.randint(0, 7, (num_samples,), generator=generator))


def loader(trainer: pl.Trainer, dataset: Any, *, size: int = 8) -> DataLoader[Any]:
    """Return a rank's loader: rank r of two has samples r, r + 2, ...; a single rank has all."""
    ranks = trainer.world_size
    return DataLoader(dataset, batch_size=size, sampler=range(trainer.global_rank, len(dataset), ranks))


class SaveAtStart(pl.Callback):
    """Saves the state that a run has just loaded, before its first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        save(trainer, self.path)


def trained(
    name: str,
    steps: int,
    *callbacks: Any,
    ckpt_path: Path | None = None,
    folder: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    """Train a Stack up to a step; with a `folder`, log each step there.

    Initial values are overwritten at random on rank 1, and on both ranks if a checkpoint is loaded.
    """
    torch.manual_seed(1)
    model = Stack(**options)
    keywords = TWO_RANKS | {"strategy": STRATEGIES[name](), "plugins": [Durable()]}
    if folder is not None:
        keywords |= {"logger": CSVLogger(folder, name, ""), "log_every_n_steps": 1}
        callbacks = (*callbacks, EfficiencyReport(dirpath=folder / name, count_first_batches=False))
    trainer = make_trainer(callbacks=list(callbacks), max_steps=steps, **keywords)
    is_drawn = not any(isinstance(callback, PeftAdapter) for callback in callbacks)
    if is_drawn and (ckpt_path or trainer.global_rank):
        with torch.no_grad():
            for tensor in [model.count, *(p for p in model.parameters() if p.requires_grad)]:
                tensor.uniform_(-1.0, 1.0)
    trainer.fit(model, loader(trainer, tokens()), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def save(trainer: pl.Trainer, path: Path) -> None:
    trainer.save_checkpoint(path, weights_only=False)
    trainer.strategy.barrier()


def adapted() -> list[Any]:
    options = {"r": 2, "lora_alpha": 4}
    return [
        PeftAdapter(method="lora", target_modules=["up", "down"], options=options),
        GradientCheckpointing(blocks="Block"), TritonGemm(min_features=1),
        GradientAccumulation(global_batch_size=32),
    ]  # fmt: skip


def main(folder: str) -> dict[str, Any]:
    path = Path(folder)
    chain, is_quick = GROUPS[path.name], path.name == "usual"
    indices = QUICK_CASES if is_quick else range(len(covering.COVERING))
    cases = {index: covering.COVERING[index] for index in indices}
    results: dict[str, Any] = {"gathered": {}, "evaluated": {}}
    results["covering"] = {
        index: covering.ours(case, STRATEGIES[case.strategy]()) for index, case in cases.items()
    }
    for name in chain[:-1]:
        trainer = trained(name, 3, folder=None if is_quick else path)
        save(trainer, path / f"{name}.ckpt")
        results["gathered"][name] = gathered(trainer)
        if is_quick:
            continue
        lora = path / f"{name}-lora.ckpt"
        save(trained(name, 2, *adapted(), rate=0.0, tied=False), lora)
        again = trained(name, 2, *adapted(), rate=0.0, tied=False, ckpt_path=lora)
        save(again, path / f"{name}-lora-again.ckpt")
        results["gathered"][f"{name}-lora"] = gathered(again)
        results["evaluated"][name] = evaluated(again)
    for one, other in [("ddp", "ddp"), *itertools.pairwise(chain)]:
        begin = SaveAtStart(path / f"{one}-{other}.ckpt")
        save(trained(other, 8, begin, ckpt_path=path / f"{one}.ckpt"), path / f"{one}-{other}-8.ckpt")
    if not is_quick:
        results["routed"] = {name: routed(name) for name in chain[1:-1] if name != "sharded"}
        results["saves"] = saves_of_a_folder(path / "again.ckpt")
    return results


def gathered(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the model's full tensors, without a checkpoint."""
    model = trainer.lightning_module
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: full_tensor(value).detach().clone() for name, value in tensors.items()}


def saves_of_a_folder(path: Path) -> dict[str, Any]:
    """Save a folder with a file per rank twice, and a third time with a full disk on rank 1."""
    trainer = trained("sharded", 3)
    io: Any = trainer.strategy.checkpoint_io
    save(trainer, path)
    first = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    save(trainer, path)
    again = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    write = os.write

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer.strategy.barrier()
    os.write = full if trainer.global_rank == 1 else write
    try:
        save(trainer, path)
        message = "saved"
    except CheckpointError as error:
        message = str(error)
    finally:
        os.write = write
    trainer.strategy.barrier()
    after = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    save(trainer, path.parent / "removed.ckpt")
    trainer.strategy.remove_checkpoint(path.parent / "removed.ckpt")
    return {"first": first, "again": again, "after": after, "error": message, "done": io.outcome().numbers}


class Routed(Stack):
    """Skips a different block on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch[0]).mean(1)
        for index, block in enumerate(self.blocks):
            hidden = hidden if index == 1 + self.global_rank else block(hidden)
        return F.cross_entropy(self.head(self.statistics(hidden)), batch[1])


def routed(name: str) -> str:
    """Return the error of ranks that run different blocks."""
    trainer = make_trainer(max_steps=4, **TWO_RANKS, strategy=STRATEGIES[name]())
    try:
        trainer.fit(Routed(), loader(trainer, tokens()))
    except ConflictError as error:
        return str(error)
    return ""


def evaluated(trainer: pl.Trainer) -> float:
    """Validate the model of a fit; return the loss."""
    model: Any = trainer.lightning_module
    losses: list[float] = []
    model.validation_step = lambda batch, batch_idx: losses.append(
        float(F.cross_entropy(model(batch[0]), batch[1]))
    )
    trainer.validate(model, loader(trainer, tokens(), size=32), verbose=False)
    return sum(losses)


@pytest.fixture(scope="module", params=["usual", pytest.param("all", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the folder of two ranks' checkpoints, and their results."""
    folder = tmp_path_factory.mktemp(request.param, numbered=False)
    results, other = results_of_two_ranks(__name__, folder)
    chain = GROUPS[request.param]
    return SimpleNamespace(folder=folder, results=results, other=other, chain=chain, names=chain[:-1])


def read(path: Path) -> dict[str, Any]:
    return Durable().load_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=True)


def checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """Return the model, the optimizer, the schedule and the step of a checkpoint."""
    content = read(folder / f"{name}.ckpt")
    return {key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def of_all(test: Callable[..., None]) -> Any:
    """Mark a test as slow, and give it the group of all strategies."""
    return pytest.mark.slow(pytest.mark.parametrize("run", ["all"], indirect=True)(test))


@of_all
def test_ranks_that_run_different_modules_are_detected(run: Any) -> None:
    for name, error in run.results["routed"].items():
        assert "different modules" in error, name


def test_combined_techniques_step_as_on_one_device(run: Any) -> None:
    """T1 in float64, T2 in float32; in bf16 a tenth of the movement. A window divided twice: 94 %."""
    for index, found in run.results["covering"].items():
        case = covering.COVERING[index]
        start, exact = covering.expected(case)
        assert set(found) == set(exact)
        for name, value in exact.items():
            ours, moved = found[name].double(), float((value - start[name]).norm())
            if case.precision == "bf16-mixed":
                error = float((ours - value).norm())
                assert error <= 0.1 * moved + 2**-8 * float(value.norm()), (case, name)
                is_copy = found[name].dtype != torch.float32 or torch.equal(ours, ours.bfloat16().double())
                assert moved == 0.0 or not is_copy, "the optimizer's float32 weights are saved"
            else:
                rtol, atol = (1e-9, 1e-11) if case.precision == "64-true" else (2e-5, 2e-6)
                torch.testing.assert_close(
                    ours, value, rtol=rtol, atol=atol, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                )
        part = "lora_" if case.lora else ""
        names = [name for name in exact if part in name and not name.startswith("frozen")]
        assert all(not torch.equal(found[name].double(), start[name]) for name in names)


@of_all
def test_the_logged_norm_is_that_of_the_full_gradient(run: Any) -> None:
    torch.manual_seed(1)
    model, (x, y) = Stack(), tokens().tensors
    for rank in range(2):
        (F.cross_entropy(model(x[rank:16:2]), y[rank:16:2]) / 2).backward()
    by_hand = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
    for name in run.chain[:-1]:
        rows = rows_of(run.folder / name)
        assert list(rows) == [1, 2, 3]
        assert rows[1]["gradient_norm"] == pytest.approx(float(by_hand), rel=1e-5), name
        of_ddp = rows_of(run.folder / "ddp")
        for step, row in rows.items():
            assert row["gradient_norm"] == pytest.approx(of_ddp[step]["gradient_norm"], rel=1e-4), name
            assert row["learning_rate"] == of_ddp[step]["learning_rate"] == (0.01 if step < 3 else 0.001)


def test_a_checkpoint_has_the_layout_of_ddps(run: Any) -> None:
    """It has tied tensors once, frozen tensors, buffers, and a separate step count per parameter.

    All ranks began with the first rank's parameters and buffers, as under DDP.
    """
    theirs = checkpoint(run.folder, "ddp")
    for name in run.names[1:]:
        ours = checkpoint(run.folder, name)
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        state = ours["state_dict"]
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        assert torch.equal(state["frozen.weight"], theirs["state_dict"]["frozen.weight"])
        assert torch.equal(state["count"], torch.full((3,), 3.0))
        (one,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
        assert one["param_groups"] == other["param_groups"]
        assert list(one["state"]) == list(other["state"])
        steps = [entry["step"] for entry in one["state"].values()]
        assert len({step.data_ptr() for step in steps}) == len(steps)
        assert all(entry.keys() == other["state"][number].keys() for number, entry in one["state"].items())
        assert ours["lr_schedulers"] == theirs["lr_schedulers"]
        for key, value in theirs["state_dict"].items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
        assert is_equal(state, run.results["gathered"][name]), "bit-identical to the model"


def test_every_strategy_and_one_device_load_a_checkpoint_unchanged(run: Any, tmp_path: Path) -> None:
    for one, other in itertools.pairwise(run.chain):
        before = checkpoint(run.folder, one)
        assert is_equal(checkpoint(run.folder, f"{one}-{other}"), before), (one, other)
        alone = make_trainer(max_steps=3, plugins=[Durable()])
        alone.fit(Stack(), loader(alone, tokens()), ckpt_path=run.folder / f"{one}.ckpt", weights_only=True)
        save(alone, tmp_path / f"{one}.ckpt")
        assert is_equal(checkpoint(tmp_path, one), before), one


def test_training_continues_as_under_ddp(run: Any) -> None:
    """Three steps under one strategy and five under the next equal eight under DDP, so no state is lost."""
    theirs = checkpoint(run.folder, "ddp-ddp-8")
    for one, other in itertools.pairwise(run.chain):
        ours = checkpoint(run.folder, f"{one}-{other}-8")
        assert ours["global_step"] == theirs["global_step"] == 8
        for key, value in theirs["state_dict"].items():
            torch.testing.assert_close(ours["state_dict"][key], value, rtol=1e-3, atol=1e-4, msg=key)


@of_all
def test_a_folder_holds_the_tensors_of_the_file(run: Any) -> None:
    assert is_equal(checkpoint(run.folder, "sharded"), checkpoint(run.folder, "fsdp2"))
    index = torch.load(run.folder / "sharded.ckpt" / "index.ckpt", weights_only=True)["checkpoint"]
    outlines = {name for name, value in index["state_dict"].items() if value.is_meta}
    assert outlines == {name for name, _ in Stack().named_parameters(remove_duplicate=False)}
    assert all(entry["exp_avg"].is_meta for entry in index["optimizer_states"][0]["state"].values())


@of_all
def test_a_folder_is_saved_by_all_ranks_or_by_none(run: Any) -> None:
    ours, other = run.results["saves"], run.other["saves"]
    assert len(ours["first"]) == len(ours["again"]) == 3
    assert set(ours["first"]) & set(ours["again"]) == {"index.ckpt"}, "the shards are new files"
    assert ours["after"] == ours["again"], "the previous checkpoint is unchanged, without other files"
    assert ours["error"].startswith("rank 1: checkpoint ")
    assert other["error"].startswith("checkpoint ")
    assert all("No space left on device" in each["error"] for each in (ours, other))
    assert ours["done"]["num_saves"] == 3
    assert ours["done"]["saved_bytes"] > 3 * 2 * 4 * sum(p.numel() for p in Stack().parameters())
    assert ours["done"]["num_removed"] == 1
    assert not (run.folder / "removed.ckpt").exists()


@of_all
def test_adapters_start_from_the_base_train_and_resume(run: Any) -> None:
    """LoRA, recomputed blocks, Triton's linear layers and a window, on a sharded base."""
    theirs = checkpoint(run.folder, "ddp-lora")
    trained = [key for key in theirs["state_dict"] if "lora_" in key]
    assert len(trained) == 12
    for name in run.names[1:]:
        ours = checkpoint(run.folder, f"{name}-lora")
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        assert not any("base_layer" in key for key in ours["state_dict"])
        for key in trained:
            torch.testing.assert_close(
                ours["state_dict"][key], theirs["state_dict"][key], rtol=1e-4, atol=1e-5
            )
            assert bool(ours["state_dict"][key].any()), "trained, and not empty"
        assert is_equal(checkpoint(run.folder, f"{name}-lora-again"), ours)
        gathered = run.results["gathered"][f"{name}-lora"]
        assert all(torch.equal(ours["state_dict"][key], gathered[key]) for key in trained)
        one, other = (read(run.folder / f"{each}-lora.ckpt") for each in (name, "ddp"))
        assert one["peft_adapter"] == other["peft_adapter"], "the digest of the base"
        assert run.results["evaluated"][name] == pytest.approx(run.results["evaluated"]["ddp"], rel=1e-4)
