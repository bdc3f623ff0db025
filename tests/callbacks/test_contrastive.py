"""Contrastive: the gradient of the full batch, on one rank and on two, in the memory of a micro-batch."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.contrastive import Contrastive
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core.call_state import RecomputationError
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning, NoEffectWarning
from lightning_eff.core.shards import full_tensor
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Layer, make_trainer, seeded
from tests.support.prediction import assert_predicted_is_measured
from tests.support.ranks import is_equal, results_of_two_ranks

NUM_SAMPLES, BATCH, STEPS, LR = 33, 11, 3, 0.5
pytestmark = pytest.mark.filterwarnings("ignore:Contrastive. embed changes count")


class Pairs(pl.LightningModule):
    """Two towers, a temperature that only the loss uses, and a buffer that counts embeddings."""

    def __init__(self, *, dropout: float = 0.0, is_frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(5, 8).requires_grad_(not is_frozen)
        self.blocks = nn.ModuleList(Layer(8, dropout) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor([1.0]))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.count += 1
        one, two = self.first(batch[0]), self.second(batch[1])
        for block in self.blocks:
            one = block(one)
        return {"one": one, "two": two}

    def similarity_loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        one, two = (F.normalize(embeddings[key], dim=1) for key in ("one", "two"))
        logits = one @ two.T * self.temperature.exp()
        targets = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.similarity_loss(self.embed(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR)


class Labelled(Pairs):
    """Supervised: samples of a class attract each other; the labels are among the embeddings."""

    def embed(self, batch: Any) -> Any:
        return super().embed(batch)["one"], batch[2], batch[2] > 1

    def similarity_loss(self, embeddings: Any) -> Tensor:
        rows, labels, is_high = embeddings
        rows = F.normalize(rows, dim=1)
        near = torch.log_softmax(rows @ rows.T * self.temperature.exp(), dim=1)
        return -(near * (labels[:, None] == labels)).mean() * (1 + is_high.double().mean())


class Sigmoid(Pairs):
    """SigLIP's loss, whose bias is a second parameter of the loss; two calls of `embed`, of one view each."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([-2.0]))

    def embed(self, batch: Any) -> Any:
        return super().embed([batch, batch[:, :5]])["one"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, two = self.embed(batch[0]), self.embed(batch[0].roll(1, 1))
        logits = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T * self.temperature.exp() + self.bias
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
        return -F.logsigmoid(signs * logits).sum() / len(logits)


class HuggingFace(Pairs):
    """The towers of Hugging Face's CLIP."""

    def __init__(self) -> None:
        from transformers import CLIPConfig, CLIPModel  # takes seconds, which both ranks would wait for

        super().__init__()
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = size | {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 48, "eos_token_id": 49}
        vision = size | {"image_size": 4, "patch_size": 2}
        self.net = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))

    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.count += 1
        image = self.net.vision_model(pixel_values=batch["pixel_values"])[1]
        text = self.net.text_model(input_ids=batch["input_ids"])[1]
        return {"one": self.net.visual_projection(image), "two": self.net.text_projection(text)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pixels, ids = batch[0].repeat(1, 8).view(-1, 3, 4, 4), (batch[1].abs() * 20).long() % 48
        return super().training_step({"pixel_values": pixels, "input_ids": ids}, batch_idx)


def samples(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(NUM_SAMPLES, n, generator=generator, dtype=torch.float64) for n in (6, 5)]
    return TensorDataset(*(t.to(dtype) for t in tensors), torch.arange(NUM_SAMPLES) % 4)


def loader(rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(samples(dtype), batch_sampler=rows)  # pyright: ignore[reportArgumentType]


FULL = [list(range(start, start + BATCH)) for start in range(0, NUM_SAMPLES, BATCH)]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, name: str = "") -> None:
    """Compare weights, which move by about 0.3; separate losses of the micro-batches would be 1e-2 off."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value, rtol=rtol, atol=rtol, msg=f"{name}: {key}")


def reference(
    kind: type[Pairs], batches: Sequence[Sequence[int]], *, window: int = 1, **options: Any
) -> Pairs:
    """Train as PyTorch's documentation does, on full batches."""
    model, dataset = seeded(kind, **options).double(), samples()
    optimizer = model.configure_optimizers()
    for number, rows in enumerate(batches):
        (model.training_step(dataset[list(rows)], number) / window).backward()
        if (number + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def trained(
    kind: type[Pairs],
    rows: Sequence[Sequence[int]],
    *callbacks: pl.Callback,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> Pairs:
    """Train in float64; with ZeRO in float32."""
    keywords = keywords or {}
    dtype = torch.float32 if isinstance(keywords.get("strategy"), DeepSpeedZero) else torch.float64
    model = seeded(kind, **options).to(dtype)
    usual = {"max_epochs": 1, "max_steps": -1, "use_distributed_sampler": False}
    trainer = make_trainer(callbacks=list(callbacks), **(usual | keywords))
    trainer.fit(model, loader(rows, dtype))
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value).detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "size"),
    [(Pairs, 1), (Labelled, 4), (Sigmoid, 4), pytest.param(HuggingFace, 3, marks=pytest.mark.slow)],
)
def test_steps_match_those_of_the_full_batch(kind: type[Pairs], size: int) -> None:
    contrastive = Contrastive(micro_batch_size=size)
    model = trained(kind, FULL, contrastive)
    assert_close(weights(model), weights(reference(kind, FULL)), 1e-12)
    calls = 2 if kind is Sigmoid else 1
    # Once per micro-batch, although each is computed twice.
    assert float(model.count) == len(FULL) * -(-BATCH // size) * calls
    assert contrastive.outcome().numbers["batches_split"] == 3
    assert not {"embed", "log", "log_dict"} & vars(model).keys()


OTHERS: dict[str, Callable[[], pl.Callback]] = {
    "selective": lambda: GradientCheckpointing(policy="selective"),
    "compiled": lambda: TorchCompile(backend="aot_eager"),
    "in backward": lambda: OptimizerChoice(optimizer=functools.partial(InBackward, lr=LR)),
    "window": lambda: GradientAccumulation(num_batches=2),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("selective", "compiled"))) for name in OTHERS],
)
@pytest.mark.filterwarnings("ignore:GradientAccumulation")
def test_steps_with_another_technique_match_those_of_that_technique_alone(name: str) -> None:
    # GradientAccumulation alone rejects this loss, which is no mean over samples; Lightning's windows do not.
    alone = {"accumulate_grad_batches": 2} if name == "window" else {}
    rows = FULL[:2]
    plain = trained(Pairs, rows, *([] if alone else [OTHERS[name]()]), keywords=alone)
    model = trained(Pairs, rows, Contrastive(micro_batch_size=4), OTHERS[name]())
    assert_close(weights(model), weights(plain), 1e-12)
    assert not torch.equal(model.temperature, torch.ones(1).double())


def test_clips_and_scales_once() -> None:
    """With a float16 scaler, the gradient has the error of plain autocast, and is clipped once."""
    found = list[Tensor]()
    for callbacks in ([], [Contrastive(micro_batch_size=2)]):
        model, start = seeded(Pairs), seeded(Pairs)
        plugins = [AutoPrecision(precision="16-mixed")]
        trainer = make_trainer(max_steps=1, plugins=plugins, callbacks=callbacks, gradient_clip_val=0.05)
        trainer.fit(model, loader(FULL, torch.float32))
        moved = [p - q for p, q in zip(model.parameters(), start.parameters(), strict=True)]
        found.append(torch.cat([each.detach().flatten() for each in moved]))
    assert float(found[1].norm()) == pytest.approx(0.05 * LR, rel=1e-3)
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=2e-5)


class Noisy(Pairs):
    """Augments by random numbers of torch, NumPy and Python; spectral norm keeps a vector as a buffer."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        torch.nn.utils.spectral_norm(self.first)

    def embed(self, batch: Any) -> dict[str, Tensor]:
        factor = random.random() + np.random.rand() * torch.rand(len(batch[0]), 1)
        return super().embed([batch[0] * factor, batch[1]])


def test_the_recomputation_has_the_same_random_numbers_and_buffers() -> None:
    plain, ours = seeded(Noisy).double(), seeded(Noisy).double()
    pl.seed_everything(1, verbose=False)
    (batch, *_), optimizer = list(loader(FULL)), plain.configure_optimizers()
    parts = [plain.embed([x[i : i + 4] for x in batch]) for i in (0, 4, 8)]
    plain.similarity_loss({key: torch.cat([part[key] for part in parts]) for key in parts[0]}).backward()
    optimizer.step()
    pl.seed_everything(1, verbose=False)
    trainer = make_trainer(max_steps=1, callbacks=[Contrastive(micro_batch_size=4)])
    trainer.fit(ours, loader(FULL))
    assert random.random() == 0.2550690257394217  # the fourth number after this seed
    assert_close(dict(ours.state_dict()), dict(plain.state_dict()), 1e-14)


class Logging(Pairs):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.log("first", batch[0].mean(), on_step=True, on_epoch=True)
        return super().embed(batch)

    def similarity_loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        loss = super().similarity_loss(embeddings)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.similarity_loss(self.embed(batch)))


def test_logs_what_the_full_batch_logs() -> None:
    logged = list[dict[str, Tensor]]()
    for callbacks in ([], [Contrastive(micro_batch_size=4)]):
        trainer = make_trainer(callbacks=callbacks, max_steps=3)
        trainer.fit(seeded(Logging).double(), loader(FULL), loader(FULL))
        logged.append(trainer.logged_metrics | trainer.callback_metrics)
    plain, ours = logged
    assert {"first_step", "first_epoch", "loss_step", "loss_epoch", "val_loss"} <= plain.keys() == ours.keys()
    for key, value in plain.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12, msg=key)


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.num_rows = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if ctx.num_rows > 3:
            raise torch.OutOfMemoryError("out of memory, by the test")
        return grads[0]


class Small(Pairs):
    """Four samples do not fit."""

    def embed(self, batch: Any) -> dict[str, Tensor]:
        return {key: OutOfMemoryInBackward.apply(rows) for key, rows in super().embed(batch).items()}  # pyright: ignore[reportReturnType]


def test_an_oom_halves_the_size_and_the_run_matches_one_of_that_size_from_the_start() -> None:
    models, keywords = list[Pairs](), {"accumulate_grad_batches": 3}
    auto = Contrastive()
    for callback in (auto, Contrastive(micro_batch_size=2)):
        models.append(trained(Small, FULL, callback, keywords=keywords, dropout=0.3))
    assert [row[:2] for row in auto.outcome().numbers["out_of_memory"]] == [[11, 5], [5, 2]]
    assert is_equal(models[0].state_dict(), models[1].state_dict())
    resumed = Contrastive()
    resumed.load_state_dict(auto.state_dict())
    trained(Small, FULL[:1], resumed)
    assert resumed.outcome().numbers == {"micro_batch_size": 2, "batches_split": 1, "out_of_memory": []}


class Wide(Pairs):
    """Wide activations, eight numbers of each tower, and a loss that holds no more than the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 256), nn.Linear(256, 8)
        self.blocks = nn.ModuleList(Layer(256, 0.1) for _ in range(3))

    def embed(self, batch: Any) -> dict[str, Tensor]:
        found = super().embed(batch)
        return {"one": self.last(found["one"]), "two": found["two"]}

    def similarity_loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        centered = embeddings["one"] - embeddings["one"].mean(0)
        covariance = centered.T @ centered / len(centered) - torch.eye(8)
        apart = (centered - embeddings["two"]).square().mean() * self.temperature.sum()
        return covariance.square().sum() + apart


def wide_loader(batch_size: int) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 2 * batch_size * 11).view(-1, 11)
    return DataLoader(TensorDataset(x[:, :6].clone(), x[:, 6:].clone()), batch_size=batch_size)


def test_the_peak_grows_only_by_the_batch_and_its_embeddings(tmp_path: Path) -> None:
    peaks = list[int]()
    for batch_size in (64, 128):
        report = EfficiencyReport(dirpath=str(tmp_path / str(batch_size)))
        callbacks = [Contrastive(micro_batch_size=16), report]
        make_trainer(callbacks=callbacks, max_steps=2).fit(seeded(Wide), wide_loader(batch_size))
        peaks.append(report.report["memory"]["num_bytes"])
    # In float32: samples and their embeddings, and the buffer that each micro-batch changes.
    assert peaks[1] - peaks[0] == 64 * 4 * (11 + 16) + 64 // 16 * 4


@pytest.mark.slow
def test_plan_predicts_the_peak_to_the_byte(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        callbacks = [Contrastive(micro_batch_size=4), GradientCheckpointing()]
        return {"callbacks": callbacks, "plugins": [AutoPrecision(precision="bf16-mixed")]}

    assert_predicted_is_measured(Wide, options, tmp_path, wide_loader(11))


class NotCalled(Pairs):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.first(batch[0]).mean()


class Compares(Pairs):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        found = super().embed(batch)
        return {key: rows - rows.mean(0) for key, rows in found.items()}


class Pooled(Pairs):
    def embed(self, batch: Any) -> Any:
        return super().embed(batch) | {"scale": self.temperature.exp().sum()}


class Stores(Pairs):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.penalty = self.first(batch[0]).square().mean()
        return super().embed(batch)


class InPlace(Pairs):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        batch[0].mul_(2.0)
        return super().embed(batch)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (NotCalled, ConflictError),
        (Compares, ConflictError),
        (Pooled, ConfigError),
        (Stores, ConflictWarning),
        (InPlace, RecomputationError),
    ],
)
def test_steps_with_another_objective_are_rejected(kind: type[Pairs], error: type[Exception]) -> None:
    with pytest.raises(error, match="embed"):
        trained(kind, FULL, Contrastive(micro_batch_size=4))


def test_a_module_without_embed_is_rejected_and_batches_that_fit_have_no_effect(
    net: Callable[..., pl.LightningModule],
) -> None:
    model = net()
    model.embed = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="embed"):
        make_trainer(callbacks=[Contrastive()]).fit(model, loader(FULL))
    with pytest.warns(NoEffectWarning):
        trained(Pairs, FULL, Contrastive(micro_batch_size=64))


class Positions(Pairs):
    """Embeds with a table, which has as many rows as the batch has samples."""

    def embed(self, batch: Any) -> dict[str, Tensor]:
        (one, two), table = batch
        return super().embed([one * table.sum(0), two])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        table = torch.linspace(-1, 1, BATCH * 6, dtype=torch.float64).view(-1, 6)
        return self.similarity_loss(self.embed([batch[:2], table]))


def test_every_micro_batch_gets_the_tensors_that_keep_names_in_full() -> None:
    with pytest.warns(ConflictWarning, match="embed changes count, "):
        model = trained(Positions, FULL, Contrastive(micro_batch_size=4, keep=["1"]))
    assert_close(weights(model), weights(reference(Positions, FULL)), 1e-12)


# The samples of rank 0 and of rank 1 in each batch
EVEN = [[list(range(s, s + 6)), list(range(s + 6, s + 12))] for s in range(0, 24, 12)]
UNEVEN = [[list(range(s, s + 8)), list(range(s + 8, s + 11))] for s in range(0, NUM_SAMPLES, BATCH)]
UNUSED = "ddp_find_unused_parameters_true"
STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp2": FSDP2,
    **{f"zero{stage}": lambda stage=stage: DeepSpeedZero(stage=stage) for stage in (1, 2, 3)},
}
# model, strategy, batches of the ranks, batches of a step, options of the model
Ranked = tuple[type[Pairs], str, Sequence[Sequence[Sequence[int]]], int, dict[str, Any]]
RANKED: dict[str, Ranked] = {
    "uneven": (Pairs, "ddp", UNEVEN, 1, {"is_frozen": True}),
    "accumulated": (Pairs, "ddp", EVEN, 2, {}),
    "labels": (Labelled, UNUSED, UNEVEN, 1, {}),
    "two views": (Sigmoid, UNUSED, UNEVEN, 1, {}),
    **{strategy: (Pairs, strategy, EVEN, 2, {}) for strategy in STRATEGIES},
}


def on_two_ranks(case: Ranked, rank: int, **settings: Any) -> dict[str, Tensor]:
    kind, strategy, rows, window, options = case
    made = STRATEGIES.get(strategy, lambda: strategy)()
    keywords = {"strategy": made, "devices": 2, "accumulate_grad_batches": window}
    callback = Contrastive(**{"micro_batch_size": 2, **settings})
    return weights(trained(kind, [batch[rank] for batch in rows], callback, keywords=keywords, **options))


def rejection(case: Ranked, rank: int, **settings: Any) -> str:
    with pytest.raises(ConflictError) as caught:
        on_two_ranks(case, rank, **settings)
    return str(caught.value)


def main(folder: str) -> dict[str, Any]:
    """Run in both ranks: the basic case, or all others, as the folder is called."""
    rank, even = int(os.environ["LOCAL_RANK"]), (Pairs, "ddp", EVEN, 1, {})
    if Path(folder).name == "uneven":
        return {"uneven": on_two_ranks(RANKED["uneven"], rank)}
    return {
        **{name: on_two_ranks(case, rank) for name, case in RANKED.items() if name != "uneven"},
        "not gathered": on_two_ranks(even, rank, gather=False),
        "auto rejected": rejection(even, rank, micro_batch_size="auto"),
        "fsdp2 rejected": rejection((Pairs, "fsdp2", UNEVEN, 1, {}), rank, gather=False),
        "zero3 rejected": rejection((Pairs, "zero3", UNEVEN, 1, {}), rank),
    }


@pytest.mark.parametrize("group", ["uneven", pytest.param("others", marks=pytest.mark.slow)])
def test_two_ranks_have_the_gradient_of_their_joint_batch(group: str, tmp_path: Path) -> None:
    folder = tmp_path / group
    folder.mkdir()
    for found in results_of_two_ranks(__name__, folder):
        for name in RANKED.keys() & found:
            kind, strategy, rows, window, options = RANKED[name]
            joint = [[*one, *other] for one, other in rows]
            expected = weights(reference(kind, joint, window=window, **options))
            # ZeRO has no float64.
            assert_close(found[name], expected, 1e-6 if "zero" in strategy else 1e-12, name)
        if group == "uneven":
            continue
        for name in ("fsdp2", "zero3"):
            assert "batches of [8, 3] samples" in found[f"{name} rejected"]
        assert "waiting for its embeddings" in found["auto rejected"]
        # Without gathering, each rank compares its own samples: the mean of two losses.
        model, dataset = seeded(Pairs).double(), samples()
        optimizer = model.configure_optimizers()
        for rows in EVEN:
            losses = [model.training_step(dataset[list(each)], 0) for each in rows]
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(found["not gathered"], weights(model), 1e-12)
