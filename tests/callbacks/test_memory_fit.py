"""`policy=fit`: the cheapest choice, a predicted peak that is measured to the byte, the smallest budget."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks._memory_fit import Mixtures, Segments
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing, RecomputedBlock, recompute
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.text import parse_bytes
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.prediction.predict import predict
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Deep, fit, make_loader, make_trainer
from tests.support.ranks import is_equal, results_of_two_ranks

WIDTH, BATCH = 32, 8
POLICIES = ("keep", "selective", "full")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, training=self.training))


class Stranger(pl.LightningModule):
    """Four blocks of two sizes, one of them frozen; logs, has hooks, and registers a buffer late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(32 + 96 * (index % 2)) for index in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.blocks[2].requires_grad_(False)

    def on_train_start(self) -> None:
        self.register_buffer("seen", torch.zeros(10))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].double(), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def stranger() -> Stranger:
    torch.manual_seed(0)
    return Stranger().double()


def loader(num_samples: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(num_samples) % 3), batch_size=BATCH)


def peak_of(policy: str, callbacks: Callable[[], list[pl.Callback]] = list, **options: Any) -> int:
    """Predict the peak with one policy for all blocks."""

    def new_trainer() -> pl.Trainer:
        own = [GradientCheckpointing(policy=policy)] if policy != "keep" else []
        return make_trainer(max_steps=2, callbacks=[*callbacks(), *own], **options)

    found = predict(stranger, next(iter(loader())), trainer=new_trainer, num_batches=5)
    assert found.peak is not None, found.reason
    return found.peak.num_bytes


def train(
    budget_bytes: int, *callbacks: pl.Callback, **options: Any
) -> tuple[Any, GradientCheckpointing, int]:
    """Return the trained module, the callback, and the measured peak."""
    fit = GradientCheckpointing(policy="fit", memory=f"{budget_bytes / 1024!r}KiB")
    report, module = EfficiencyReport(dirpath=options.pop("folder", None)), stranger()
    watching = [report] if report.dirpath else []
    # The report comes first: what is predicted after its start must not be counted.
    trainer = make_trainer(max_steps=2, callbacks=[*watching, *callbacks, fit], **options)
    trainer.fit(module, loader())
    return module, fit, report.report["measured"]["peak_bytes"] if watching else 0


def drawn(seed: int) -> dict[str, Segments]:
    """Return recordings of two passes over six blocks, three of a kind, with each policy."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 40, (2, len(POLICIES), 5))
    order = [*range(6), *reversed(range(6))] * 2
    found: dict[str, Segments] = {}
    for index, policy in enumerate(POLICIES):
        net, rise, flops = [], [], []
        for place, block in enumerate(order):
            held, up, back, extra, moved = kinds[block % 2, index].tolist()
            is_forward = place % 12 < 6
            net.append(held if is_forward else -held)
            rise.append(max(0, net[-1]) + (up if is_forward else back))
            flops.append(0 if is_forward else extra % 3)
        found[policy] = Segments(
            peak_bytes=0, blocks=[f"{block}" for block in order], first_bytes=7, start_bytes=5,
            net=net, rise=rise, flops=flops, moved_bytes=[moved % 2] * len(order),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_mixture_under_any_limit_equals_a_brute_force_search(seed: int) -> None:
    mixtures = Mixtures(drawn(seed))
    names = mixtures.names
    every = [dict(zip(names, each, strict=True)) for each in itertools.product(POLICIES, repeat=len(names))]
    peaks = [mixtures.peak_bytes(each) for each in every]
    costs = [mixtures.cost(each) for each in every]
    assert mixtures.smallest_bytes() == min(peaks)
    assert mixtures.cheapest(min(peaks) - 1) is None
    for limit in sorted(set(peaks)):
        choice = mixtures.cheapest(limit)
        assert choice is not None
        assert mixtures.peak_bytes(choice) <= limit
        best = min(cost for cost, peak in zip(costs, peaks, strict=True) if peak <= limit)
        assert mixtures.cost(choice) == best


def test_the_measured_peak_is_the_predicted_one_and_weights_equal_the_plain_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.gradient_checkpointing\.memory=") as caught:
        train(1024)
    named = re.search(r'memory="(\S+)"', str(caught.value))
    assert named is not None, "the error names the smallest budget that works"
    budget = parse_bytes(named[1]) * 21 // 20
    module, fit, measured = train(budget, folder=str(tmp_path))
    found = fit.outcome().numbers
    assert found["predicted_peak_bytes"] == measured <= budget
    assert len(set(found["policies"].values())) > 1
    assert found["policies"]["blocks.0"] in POLICIES
    assert str(found["policies"]["blocks.0"]) in fit.outcome().did
    plain = stranger()
    make_trainer(max_steps=2).fit(plain, loader())
    assert is_equal([*plain.parameters()], [*module.parameters()])
    assert not any(map(RecomputedBlock.of, module.modules())), "hooks are removed at the end"


def test_a_step_that_fits_recomputes_nothing() -> None:
    _, fit, _ = train(2**30)
    assert set(fit.outcome().numbers["policies"].values()) == {"keep"}
    assert fit.outcome().did.startswith("blocks.0-3 keep; predicted peak")


class Reads(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0], torch.from_numpy(batch[1].numpy())), batch_idx)


def test_a_step_that_cannot_be_predicted_and_conflicting_techniques_are_rejected() -> None:
    held = stranger()
    held.lock = threading.Lock()
    for module in (held, Reads().double()):
        with pytest.raises(ConfigError, match=r"callbacks\.gradient_checkpointing\.policy="):
            fit(module, GradientCheckpointing(policy="fit"), loader=loader())
    with pytest.raises(ConfigError, match="policy="):
        recompute(stranger(), policy={"blocks.6": "full"})
    for memory in ("20", "0GiB", 2.0):
        with pytest.raises(ConfigError, match="memory="):
            GradientCheckpointing(policy="fit", memory=memory)
    for options in ({"callbacks": [TorchCompile()]}, {"strategy": FSDP2()}):
        with pytest.raises(ConflictError):
            train(2**30, *options.pop("callbacks", []), **options)
    model = Deep()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="compiled"):
        fit(model, GradientCheckpointing(policy="fit", memory="1GiB"))
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ConflictError):
        fit(Deep(), GradientCheckpointing(policy="fit", memory="1GiB"), scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulation", "micro-batches", "lora"])
def test_the_predicted_peak_with_other_techniques_is_measured(case: str, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2} if case == "accumulation" else {}
    others: dict[str, Callable[[], pl.Callback]] = {
        "micro-batches": lambda: MicroBatch(micro_batch_size=4),
        "lora": lambda: PeftAdapter(target_modules=["up", "down"], modules_to_save=["head"]),
    }

    def callbacks() -> list[pl.Callback]:
        return [others[case]()] if case in others else []

    least, most = (peak_of(policy, callbacks, **options) for policy in ("full", "keep"))
    budget = int(least + 0.4 * (most - least))
    _, fit, measured = train(budget, *callbacks(), folder=str(tmp_path), **options)
    assert fit.outcome().numbers["predicted_peak_bytes"] == measured <= budget


@pytest.mark.slow
def test_for_a_simulated_gpu_blocks_are_offloaded_and_allocations_rounded_up() -> None:
    batch = (torch.zeros(512, 8), torch.arange(512) % 3)

    def on_a100(callback: GradientCheckpointing) -> int:
        def new_trainer() -> pl.Trainer:
            return make_trainer(max_steps=2, callbacks=[callback])

        found = predict(stranger, batch, trainer=new_trainer, num_batches=5, capability=80)
        assert found.in_blocks is not None, found.reason
        return found.in_blocks.num_bytes

    full, offload = (on_a100(GradientCheckpointing(policy=policy)) for policy in ("full", "offload"))
    assert offload < full
    fit = GradientCheckpointing(policy="fit", memory=f"{(full + offload) / 2048}KiB")
    assert on_a100(fit) == fit.outcome().numbers["predicted_peak_bytes"] <= (full + offload) / 2
    policies = list(fit.outcome().numbers["policies"].values())
    assert {"full", "offload"} <= {*policies}, "it moves no more than necessary"
    assert fit.assumptions()[0].startswith("policy=fit: blocks.0")


def main(folder: str) -> list[Any]:
    """Train with `fit`, `full` and too small a budget; the second rank has half the samples."""
    del folder
    rank = int(os.environ["LOCAL_RANK"])
    found: list[Any] = []
    budget = (peak_of("full") + peak_of("keep")) // 2 / 1024
    for technique in (
        GradientCheckpointing(policy="fit", memory=f"{budget}KiB"),
        GradientCheckpointing(),
        GradientCheckpointing(policy="fit", memory="1KiB"),
    ):
        module, batches = stranger(), DataLoader(loader().dataset, batch_size=BATCH >> rank)
        options = {
            "devices": 2,
            "strategy": "ddp_find_unused_parameters_true",
            "use_distributed_sampler": False,
        }
        try:
            make_trainer(max_steps=2, callbacks=[technique], **options).fit(module, batches)
        except ConfigError as error:
            found.append(str(error))
            continue
        found.append(
            ({name: each.detach() for name, each in module.named_parameters()}, technique.outcome().numbers)
        )
    return found


@pytest.mark.slow
def test_two_ranks_choose_alike_for_the_rank_with_more_samples(tmp_path: Path) -> None:
    first, second = results_of_two_ranks(__name__, tmp_path)
    (weights, chosen), (full, _), rejected = first
    assert chosen == second[0][1], "policies and peak"
    assert len(set(chosen["policies"].values())) > 1
    assert is_equal([*weights.values()], [*second[0][0].values()])
    assert is_equal([*weights.values()], [*full.values()])
    assert rejected == second[2]
    assert "gradient_checkpointing.memory=" in rejected


class Doubled(Deep):
    """Has a hook that doubles the batch, which must not happen twice."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": torch.cat([batch[0]] * 2), "y": torch.cat([batch[1]] * 2)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def test_predictions_do_not_call_the_modules_hooks_around_a_batch_again() -> None:
    found: list[Any] = []
    for model, batch_size in ((Doubled(), 4), (Deep(), 8)):
        callback = GradientCheckpointing(policy="fit", memory="1GiB")
        fit(model, callback, loader=make_loader(batch_size=batch_size))
        found.append(callback.outcome().numbers)
    assert found[0] == found[1]
