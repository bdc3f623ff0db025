"""Compare the predicted and the measured memory of small models, with their batches and their Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.models.cnn import CNN
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.prediction.predict import predict
from tests.support.models import make_trainer


class Encoder(pl.LightningModule):
    """A stack of torch's own encoder layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, targets = batch
        weight = (targets >= 0).sum()
        loss = F.cross_entropy(
            self.head(self.layers(self.embedding(tokens))).flatten(0, 1), targets.flatten()
        )
        self.log("loss", loss)
        return {"loss": loss, "loss_weight": float(weight)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Llama(pl.LightningModule):
    """A small model of Hugging Face transformers with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.net = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            )
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


GPT_OF = functools.partial(GPT, vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2)
CNN_OF = functools.partial(CNN, channels=4, num_blocks=2)


def choice(optimizer: Any) -> OptimizerChoice:
    return OptimizerChoice(optimizer=functools.partial(optimizer, lr=0.01))


def loader_for(make: Callable[[], pl.LightningModule]) -> DataLoader[Any]:
    if getattr(make, "func", None) is CNN:
        return DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 10), batch_size=4)
    tokens = torch.arange(40 * 17).view(40, 17) % 64
    return DataLoader(TensorDataset(tokens[:, :16].clone(), tokens[:, 1:].clone()), batch_size=4)


def trainer_of(extra: dict[str, Any], *watching: pl.Callback) -> pl.Trainer:
    return make_trainer(**{"max_steps": 2} | extra | {"callbacks": [*extra.get("callbacks", []), *watching]})


def assert_predicted_is_measured(
    make: Callable[[], pl.LightningModule],
    plugins: Callable[[], dict[str, Any]],
    folder: Path,
    loader: DataLoader[Any] | None = None,
) -> None:
    """Predict a training, run it, and compare; `plugins` makes new objects, since each serves one run."""
    loader = loader or loader_for(make)
    found = predict(make, next(iter(loader)), trainer=lambda: trainer_of(plugins()), num_batches=len(loader))
    assert found.reason == ""
    assert found.peak is not None
    report = EfficiencyReport(dirpath=str(folder))
    trainer_of(plugins(), report).fit(make(), loader)
    measured = report.report["memory"]
    assert found.peak.num_bytes == report.report["measured"]["peak_bytes"] == measured["num_bytes"]
    assert found.peak.by_phase == measured["by_phase"]
    assert found.peak.by_category == measured["by_category"]
    assert sum(found.peak.by_category.values()) == found.peak.num_bytes
