"""ZeRO and FSDP2 on two ranks (gloo): the steps of one device, and checkpoints that go from any to any.

One start of two processes for each group of strategies; `main` runs in both of them, and the tests read what
they have saved.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
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
    "in_parts": lambda: FSDP2(checkpoints="sharded"),
}
# Each strategy loads what the one before it has saved: all save what DDP does, so any loads any other's.
GROUPS = {
    "usual": ["ddp", "zero2", "fsdp2", "ddp"],
    "others": ["ddp", "zero3", "fsdp2", "in_parts", "fsdp2_offload", "zero1", "zero3_offload", "ddp"],
}
TOGETHER: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False, "enable_checkpointing": False}


class Block(nn.Module):
    """Adds what two linear layers say of a normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stack(pl.LightningModule):
    """Blocks between tied tensors, something frozen, running statistics and a buffer.

    AdamW trains it, or with a rate of 0 plain SGD with momentum; if `tied`, the head is the embedding.
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
        return F.cross_entropy((self if batch_idx % 2 else self.logits)(x), y)  # through forward, or not

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
    """Return what a rank sees: samples r, r + 2, ... of two ranks, and all of one."""
    ranks = trainer.world_size
    return DataLoader(dataset, batch_size=size, sampler=range(trainer.global_rank, len(dataset), ranks))


class SaveAtStart(pl.Callback):
    """Saves what a run has just loaded, before its first step."""

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
    """Train a Stack for so many steps in all; only rank 0 begins with what counts, or none if it loads.

    In a `folder` each step is logged.
    """
    torch.manual_seed(1)
    model = Stack(**options)
    keywords = TOGETHER | {"strategy": STRATEGIES[name](), "plugins": [Durable()]}
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
    chain = GROUPS[path.name]
    sharded = chain[1:-1]
    results: dict[str, Any] = {"gathered": {}, "evaluated": {}}
    results["covering"] = {
        index: covering.ours(case, STRATEGIES[case.strategy]())
        for index, case in enumerate(covering.COVERING)
        if case.strategy in sharded
    }
    results["routed"] = {name: routed(name) for name in sharded if name != "in_parts"}
    for name in chain[:-1]:
        trainer = trained(name, 3, folder=path)
        save(trainer, path / f"{name}.ckpt")
        results["gathered"][name] = gathered(trainer)
        lora = path / f"{name}-lora.ckpt"
        save(trained(name, 2, *adapted(), rate=0.0, tied=False), lora)
        again = trained(name, 2, *adapted(), rate=0.0, tied=False, ckpt_path=lora)
        save(again, path / f"{name}-lora-again.ckpt")
        results["gathered"][f"{name}-lora"] = gathered(again)
        results["evaluated"][name] = evaluated(again)
    for one, other in [("ddp", "ddp"), *itertools.pairwise(chain)]:
        begin = SaveAtStart(path / f"{one}-{other}.ckpt")
        save(trained(other, 8, begin, ckpt_path=path / f"{one}.ckpt"), path / f"{one}-{other}-8.ckpt")
    if "in_parts" in chain:
        results["in_parts"] = in_parts(path / "again.ckpt")
    return results


def gathered(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the model's own tensors, put together without a checkpoint."""
    model = trainer.lightning_module
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: full_tensor(value).detach().clone() for name, value in tensors.items()}


def in_parts(path: Path) -> dict[str, Any]:
    """Save a folder with a file for each rank twice, the second time with a full disk on one of them."""
    trainer = trained("in_parts", 3)
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
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    finally:
        os.write = write
    trainer.strategy.barrier()
    after = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    save(trainer, path.parent / "removed.ckpt")
    trainer.strategy.remove_checkpoint(path.parent / "removed.ckpt")
    return {"first": first, "again": again, "after": after, "said": said, "done": io.outcome().numbers}


class Routed(Stack):
    """Leaves another block out on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch[0]).mean(1)
        for index, block in enumerate(self.blocks):
            hidden = hidden if index == 1 + self.global_rank else block(hidden)
        return F.cross_entropy(self.head(self.statistics(hidden)), batch[1])


def routed(name: str) -> str:
    """Return the error of ranks that run different parts of a model."""
    trainer = make_trainer(max_steps=4, **TOGETHER, strategy=STRATEGIES[name]())
    try:
        trainer.fit(Routed(), loader(trainer, tokens()))
    except ConflictError as error:
        return str(error)
    return ""


def evaluated(trainer: pl.Trainer) -> float:
    """Return the loss of a validation after a fit, on the same model."""
    model: Any = trainer.lightning_module
    losses: list[float] = []
    model.validation_step = lambda batch, batch_idx: losses.append(
        float(F.cross_entropy(model(batch[0]), batch[1]))
    )
    trainer.validate(model, loader(trainer, tokens(), size=32), verbose=False)
    return sum(losses)


@pytest.fixture(scope="module", params=["usual", pytest.param("others", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return where two ranks have left their checkpoints, and their results."""
    folder = tmp_path_factory.mktemp(request.param, numbered=False)
    results, other = results_of_two_ranks(__name__, folder)
    chain = GROUPS[request.param]
    return SimpleNamespace(folder=folder, results=results, other=other, chain=chain, names=chain[:-1])


def read(path: Path) -> dict[str, Any]:
    return Durable().load_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=True)


def checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """Return what a checkpoint holds, but for where the loop was and what was on."""
    content = read(folder / f"{name}.ckpt")
    return {key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def test_ranks_that_run_other_parts_are_found(run: Any) -> None:
    for name, said in run.results["routed"].items():
        assert "different modules" in said, name


def test_techniques_together_step_as_one_device_does(run: Any) -> None:
    """T1 in float64, T2 in float32: a window divided twice is 94 % off; in bf16 a tenth of the movement."""
    assert len(run.results["covering"]) >= 5
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
                assert moved == 0.0 or not is_copy, "the optimizer's own weights are saved"
            else:
                rtol, atol = (1e-9, 1e-11) if case.precision == "64-true" else (2e-5, 2e-6)
                torch.testing.assert_close(
                    ours, value, rtol=rtol, atol=atol, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                )
        part = "lora_" if case.lora else ""
        names = [name for name in exact if part in name and not name.startswith("frozen")]
        assert all(not torch.equal(found[name].double(), start[name]) for name in names)


def test_the_norm_that_is_logged_is_of_the_whole_gradient(run: Any) -> None:
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
    """Tied tensors are one, frozen ones and buffers are there, numbers are each parameter's own.

    All ranks have begun with what the first has drawn, parameters and buffers, as under DDP.
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
        assert is_equal(state, run.results["gathered"][name]), "what the model holds, to the bit"


def test_a_checkpoint_goes_from_one_to_the_next_unchanged(run: Any, tmp_path: Path) -> None:
    """And from each of them to one device."""
    for one, other in itertools.pairwise(run.chain):
        before = checkpoint(run.folder, one)
        assert is_equal(checkpoint(run.folder, f"{one}-{other}"), before), (one, other)
        alone = make_trainer(max_steps=3, plugins=[Durable()])
        alone.fit(Stack(), loader(alone, tokens()), ckpt_path=run.folder / f"{one}.ckpt", weights_only=True)
        save(alone, tmp_path / f"{one}.ckpt")
        assert is_equal(checkpoint(tmp_path, one), before), one


def test_training_continues_as_under_ddp(run: Any) -> None:
    """Three steps under one and five under the next, against DDP for both: lost state would show."""
    theirs = checkpoint(run.folder, "ddp-ddp-8")
    for one, other in itertools.pairwise(run.chain):
        ours = checkpoint(run.folder, f"{one}-{other}-8")
        assert ours["global_step"] == theirs["global_step"] == 8
        for key, value in theirs["state_dict"].items():
            torch.testing.assert_close(ours["state_dict"][key], value, rtol=1e-3, atol=1e-4, msg=key)


def test_a_folder_holds_what_the_file_holds(run: Any) -> None:
    if "in_parts" not in run.names:
        pytest.skip("the other group saves a folder")
    assert is_equal(checkpoint(run.folder, "in_parts"), checkpoint(run.folder, "fsdp2"))
    index = torch.load(run.folder / "in_parts.ckpt" / "index.ckpt", weights_only=True)["checkpoint"]
    outlines = {name for name, value in index["state_dict"].items() if value.is_meta}
    assert outlines == {name for name, _ in Stack().named_parameters(remove_duplicate=False)}
    assert all(entry["exp_avg"].is_meta for entry in index["optimizer_states"][0]["state"].values())


def test_a_folder_is_saved_by_all_ranks_or_by_none(run: Any) -> None:
    """Saved anew, saved again in place, then with a full disk on one rank, which the other hears of."""
    if "in_parts" not in run.results:
        pytest.skip("the other group saves a folder")
    ours, other = run.results["in_parts"], run.other["in_parts"]
    assert [re.sub("[0-9a-f]{16}", "TOKEN", name) for name in sorted(ours["first"])] == [
        *("index.ckpt", "part-TOKEN-0-of-2.ckpt", "part-TOKEN-1-of-2.ckpt")
    ]
    assert len(ours["again"]) == 3
    assert set(ours["first"]) & set(ours["again"]) == {"index.ckpt"}, "new parts, and the old ones gone"
    assert ours["after"] == ours["again"], "the checkpoint before is as it was, and no other file is there"
    assert ours["said"].startswith("rank 1: checkpoint ")
    assert other["said"].startswith("checkpoint ")
    assert all("No space left on device" in said for said in (ours["said"], other["said"]))
    assert ours["done"]["num_saves"] == 3
    assert ours["done"]["saved_bytes"] > 3 * 2 * 4 * sum(p.numel() for p in Stack().parameters())
    assert ours["done"]["num_removed"] == 1
    assert not (run.folder / "removed.ckpt").exists()


def test_adapters_begin_train_and_come_back(run: Any) -> None:
    """LoRA, recomputed blocks, our linear layers and a window, on a base in parts."""
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
        whole = [read(run.folder / f"{each}-lora.ckpt") for each in (name, "ddp")]
        assert whole[0]["peft_adapter"] == whole[1]["peft_adapter"], "the same fingerprint of the base"
        assert run.results["evaluated"][name] == pytest.approx(run.results["evaluated"]["ddp"], rel=1e-4)
