"""A loop under Fabric on two ranks, the plain loop with the same result, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_eff import ExactGradient
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.shards import full_tensor
from tests.support.counted import Operators
from tests.support.models import make_trainer

NUM_STEPS = 4
SAVED_AFTER = 2
CLIP = 0.2
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
}


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(pl.LightningModule):
    """Blocks of odd sizes, a head of three rows, a frozen layer and a buffer; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 3, bias=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x) * self.scale)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}]
        groups += [{"params": [p for p in self.parameters() if p.dim() == 1]}]
        return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def tower(dtype: torch.dtype, seed: int = 1) -> Tower:
    torch.manual_seed(seed)
    return Tower().to(dtype)


def data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of eight samples for each step."""
    generator = torch.Generator().manual_seed(5)
    sizes = (NUM_STEPS, 8, 5), (NUM_STEPS, 8, 3)
    x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return list(zip(x.to(dtype), y.to(dtype), strict=True))


def plain(
    dtype: torch.dtype, last: int = NUM_STEPS, *, resume: Any = None, value: float | None = None
) -> SimpleNamespace:
    """Train without Lightning, from the beginning or from a checkpoint after `SAVED_AFTER` steps."""
    model = tower(dtype)
    optimizer, norms = model.optimizer(), list[float]()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
        schedule.load_state_dict(resume["schedule"])
    for batch in data(dtype)[SAVED_AFTER if resume else 0 : last]:
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        if value is not None:
            nn.utils.clip_grad_value_(model.parameters(), value)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
    content = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    return SimpleNamespace(state=model.state_dict(), norms=norms, **content)


class Collectives(Operators):
    """Counts the collectives that communicate gradients, which are all except all-gathers."""

    def count(self, func: Any, args: Any, result: Any) -> None:
        name = str(func).removeprefix("c10d.").partition(".")[0]
        if str(func).startswith("c10d.") and "gather" not in name:
            self.counts[name] += 1


class Loop:
    """A hand-written loop under Fabric; rank 1 starts with other weights, which rank 0's must replace."""

    def __init__(self, strategy: Any, dtype: torch.dtype, *, separate: bool = False) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        self.own = tower(dtype, seed=1 + self.fabric.global_rank)
        self.dtype = dtype
        self.norms: list[Any] = []
        self.synced: list[tuple[int, int]] = []
        step_lr = torch.optim.lr_scheduler.StepLR
        if separate:
            self.model = self.fabric.setup_module(self.own)
            self.optimizer: Any = self.fabric.setup_optimizers(self.own.optimizer())
            self.schedule = step_lr(self.optimizer, 1, 0.7)
        else:
            optimizer = self.own.optimizer()
            schedule = step_lr(optimizer, 1, 0.7)
            self.model, self.optimizer, self.schedule = self.fabric.setup(
                self.own, optimizer, scheduler=schedule
            )

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        x, y = data(self.dtype)[step]
        rank = self.fabric.global_rank
        return [(x[start : start + 2], y[start : start + 2]) for start in (2 * rank, 4 + 2 * rank)]

    def train(self, first: int, last: int, *, value: float | None = None) -> Loop:
        for step in range(first, last):
            self.optimizer.zero_grad()
            counts: list[int] = []
            for index, (x, y) in enumerate(self.micro_batches(step)):
                with self.fabric.no_backward_sync(self.model, enabled=index == 0), Collectives() as seen:
                    self.fabric.backward(F.mse_loss(self.model(x), y) / 2)
                counts.append(seen.counts.total())
            self.synced.append((counts[0], counts[1]))
            self.clip_and_step(value)
        return self

    def clip_and_step(self, value: float | None = None) -> None:
        if value is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, clip_val=value)
        else:
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            self.norms.append(norm if norm is None else float(norm))
        self.optimizer.step()
        self.schedule.step()

    def state(self, step: int) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": step}

    def gathered(self) -> dict[str, Tensor]:
        """Return the model's full tensors, without a checkpoint."""
        tensors = dict(self.own.named_parameters()) | dict(self.own.named_buffers())
        return {name: full_tensor(value).detach().clone() for name, value in tensors.items()}


def usual(path: Path, strategy: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Train, save, save with the Trainer's names, and continue."""
    loop = Loop(strategy(), dtype).train(0, SAVED_AFTER)
    loop.fabric.save(path / "ours.ckpt", loop.state(SAVED_AFTER))
    saved = loop.gathered()
    states = {"optimizer_states": [loop.optimizer], "lr_schedulers": [loop.schedule]}
    versions = {"pytorch-lightning_version": pl.__version__, "global_step": SAVED_AFTER, "epoch": 0}
    loop.fabric.save(path / "named.ckpt", {"state_dict": loop.model} | states | versions)
    discarded = Loop(strategy(), dtype)
    with discarded.fabric.no_backward_sync(discarded.model, enabled=False):
        pass  # reduction stays on afterwards: else zero_grad would not see the gradients
    discarded.fabric.backward(discarded.model(data(dtype)[3][0]).sum())
    found = {"saved": saved, "discarded": discarded.train(0, NUM_STEPS).gathered()}
    found |= {"ended": loop.train(SAVED_AFTER, NUM_STEPS).gathered(), "exact": exact(strategy(), dtype)}
    return found | {"norms": loop.norms, "synced": loop.synced}


class Batches(torch.utils.data.IterableDataset[Any]):
    """The samples of a rank, a batch for each step after the checkpoint."""

    def __init__(self, dtype: torch.dtype, rank: int) -> None:
        super().__init__()
        self.batches = [(x[[0, 1, 4, 5]], y[[0, 1, 4, 5]]) for x, y in data(dtype)[SAVED_AFTER:]]
        if rank:
            self.batches = [(x[[2, 3, 6, 7]], y[[2, 3, 6, 7]]) for x, y in data(dtype)[SAVED_AFTER:]]

    def __iter__(self) -> Any:
        return iter(self.batches)


def with_the_trainer(path: Path, strategy: Any, trainers: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Continue under the Trainer's strategy, save there, and load that under Fabric again."""
    keywords = {"devices": 2, "use_distributed_sampler": False, "gradient_clip_val": CLIP}
    trainer = make_trainer(strategy=trainers, max_steps=NUM_STEPS - SAVED_AFTER, **keywords)
    loader = torch.utils.data.DataLoader(Batches(dtype, trainer.global_rank), batch_size=None)
    trainer.fit(tower(dtype, seed=7), loader, ckpt_path=path / "named.ckpt", weights_only=True)
    trainer.save_checkpoint(path / "trainer.ckpt")
    loop = Loop(strategy(), dtype)
    state = {"state_dict": loop.model, "optimizer_states": [loop.optimizer]}
    rest = loop.fabric.load(path / "trainer.ckpt", state)
    loop.fabric.save(path / "back.ckpt", loop.state(NUM_STEPS))
    is_kept = state["optimizer_states"][0] is loop.optimizer
    return {"trained": loop.gathered(), "trainer_rest": sorted(rest), "is_kept": is_kept}


def exact(strategy: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Step with the exact gradient of weighted micro-batches of one sample."""
    loop = Loop(strategy, dtype)
    gradient = ExactGradient(loop.model, fabric=loop.fabric, micro_batch_size=1)

    def step(batch: Any) -> dict[str, Any]:
        x, y, weight = batch
        return {"loss": F.mse_loss(loop.model(x), y), "loss_weight": weight.sum()}

    for number in range(NUM_STEPS):
        x, y = data(dtype)[number]
        batch = tuple(tensor[loop.fabric.global_rank :: 2] for tensor in (x, y, WEIGHTS))
        gradient.backward(step, *[tuple(t[half : half + 2] for t in batch) for half in (0, 2)])
        loop.clip_and_step()
    return loop.gathered()


WEIGHTS = torch.tensor([1.0, 5.0, 2.0, 3.0, 7.0, 1.0, 1.0, 4.0], dtype=torch.float64)


def exact_plain(dtype: torch.dtype) -> dict[str, Tensor]:
    model = tower(dtype)
    optimizer = model.optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for x, y in data(dtype):
        optimizer.zero_grad()
        (((model(x) - y) ** 2).mean(1) @ WEIGHTS.to(dtype) / WEIGHTS.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def error_of(act: Any) -> str:
    try:
        act()
    except (ConflictError, ConfigError, RuntimeError) as error:
        return str(error)
    return ""


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **TOLERANCES[dtype], msg=lambda m, n=name: f"{n}: {m}")
