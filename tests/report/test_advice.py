"""The advice of a run: a following run accepts it, and saves the predicted bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_eff
from lightning_eff.core.dtypes import DtypeSupport
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.advice import advise

TOLERANCE = 0.05
"""Fraction of the peak; a replay does not include the memory that a technique itself needs."""
SAMPLES = 8


class Net(pl.LightningModule):
    """Trains some layers with AdamW by a loss of their output."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.net(x), y)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Attend(nn.Module):
    """Attention that computes its scores itself, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(query @ key.transpose(1, 2), -1) @ value
        return x + self.mlp(self.norm(x))


class InPlace(nn.Module):
    """A block that writes to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x.relu_())))


def mean_square(x: Tensor, _: Tensor) -> Tensor:
    return x.square().mean()


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def contrastive(x: Tensor, _: Tensor) -> Tensor:
    x = F.normalize(x.flatten(1), dim=-1)
    return F.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)))


def language_model() -> Net:
    blocks = [Attend(32) for _ in range(3)]
    return Net(nn.Sequential(nn.Embedding(900, 32), *blocks, nn.Linear(32, 900)), of_tokens)


def layers(kind: type[Net], loss: Callable[[Tensor, Tensor], Tensor]) -> Net:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return kind(nn.Sequential(*blocks, nn.Linear(32, 8)), loss)


def data(kind: str) -> DataLoader[Any]:
    tokens = torch.randint(0, 900, (SAMPLES * 4, 48))
    x = tokens if kind == "tokens" else torch.randn(SAMPLES * 4, 48, 32)
    return DataLoader(TensorDataset(x, tokens % 8 if kind == "vectors" else tokens), batch_size=SAMPLES)


def run(
    model: Net, loader: DataLoader[Any], folder: Any, *techniques: Any, logger: Any = False, **keywords: Any
) -> dict[str, Any]:
    report = EfficiencyReport(dirpath=folder)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    pl.Trainer(
        accelerator="cpu", max_steps=3, logger=logger, callbacks=[report, *techniques], **quiet, **keywords
    ).fit(model, loader)  # fmt: skip
    return report.report


def suggested(report: dict[str, Any]) -> set[str]:
    """Return the names of the suggested techniques, or the code that is suggested."""
    found = (row["try"].replace("[", "(").split("(") for row in report["advice"])
    return {words[1 if words[0].endswith("s=") else 0].partition("=")[0] for words in found}


def test_followed_advice_saves_what_was_predicted(tmp_path: Any) -> None:
    report = run(language_model(), data("tokens"), tmp_path)
    peak_bytes = report["measured"]["peak_bytes"]
    names = {name: getattr(lightning_eff, name) for name in dir(lightning_eff) if name[0].isupper()}
    assert suggested(report) >= {"TiledLoss", "MicroBatch", "GradientCheckpointing"}
    for row in report["advice"]:
        if row["try"].startswith("F."):
            continue
        code = f"dict({row['try'].replace('...', '1e-3')})"
        (technique,), *_ = eval(code, names | {"partial": functools.partial}).values()
        followed = run(language_model(), data("tokens"), tmp_path, technique)
        assert followed["ledger"][0]["status"] == "applied"
        saved = peak_bytes - followed["measured"]["peak_bytes"]
        assert saved == pytest.approx(row["saved_bytes"], abs=TOLERANCE * peak_bytes), row


def in_place() -> Net:
    return Net(nn.Sequential(nn.Linear(32, 32), *map(InPlace, [32] * 4)), mean_square)


MODELS: dict[str, tuple[Callable[[], Net], str, str]] = {
    "few classes": (lambda: layers(Net, of_tokens), "MicroBatch", "TiledLoss"),
    "contrastive": (lambda: layers(Net, contrastive), "GradientCheckpointing", "MicroBatch"),
    "in place": (in_place, "MicroBatch", "GradientCheckpointing"),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_the_run_would_reject_is_not_suggested(case: str, tmp_path: Any) -> None:
    model, expected, never = MODELS[case]
    found = suggested(run(model(), data("vectors"), tmp_path))
    assert expected in found
    assert never not in found


def test_advice_leaves_no_trace(tmp_path: Any) -> None:
    rows, logger = list[float](), CSVLogger(tmp_path)

    class Logging(Net):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.loggers[0].log_metrics({"batch": float(batch_idx)})
            rows.append(batch_idx)
            return super().training_step(batch, batch_idx)

    report = run(layers(Logging, mean_square), data(""), tmp_path, logger=logger)
    assert "MicroBatch" in suggested(report)
    logged = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(logged) - 1 == 3 < len(rows), "the check ran, and logged nothing"


def with_dropout() -> Net:
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(3))
    return Net(nn.Sequential(*blocks), mean_square)


SLOW, FAST = 1.0, 1e-6
"""Mean seconds of an operation."""
COMPILE, LOW_PRECISION = {"callbacks=[TorchCompile()]"}, {"plugins=[AutoPrecision()]"}
MEASURED: dict[str, tuple[Any, list[tuple[float, float, float, bool, set[str]]]]] = {
    "float32": (
        AutoPrecision(precision="32-true"),
        [
            (0.2, 0.5, SLOW, True, COMPILE),
            (0.5, 0.2, SLOW, True, LOW_PRECISION),
            (0.5, 0.2, SLOW, False, set()),
            (0.5, 0.2, FAST, True, set()),
        ],
    ),
    "bfloat16": (AutoPrecision(precision="bf16-mixed"), [(0.9, 0.1, SLOW, True, set())]),
    "micro-batches": (
        lightning_eff.MicroBatch(micro_batch_size=2),
        [(0.2, 0.2, FAST, True, {"MicroBatch(micro_batch_size=4)"}), (0.2, 0.2, SLOW, True, set())],
    ),
    "compiled": (lightning_eff.TorchCompile(backend="eager"), [(0.2, 0.5, SLOW, True, set())]),
    "dropout": (None, [(0.1, 0.9, SLOW, True, set())]),
}
"""By run: its technique, and rows of (share of products, of pointwise operations, seconds of an operation,
whether the device computes bfloat16, expected advice)."""


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("case", MEASURED)
def test_what_takes_the_time_decides_what_would_save_it(
    case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    technique, rows = MEASURED[case]
    support = "lightning_eff.core.dtypes.dtype_support"
    monkeypatch.setattr(support, lambda *_: DtypeSupport(native=True, why=""))
    asked: list[Any] = []
    monkeypatch.setattr(
        "lightning_eff.monitors.efficiency_report.advise", lambda *given: asked.append(given) or []
    )
    model = with_dropout() if case == "dropout" else layers(Net, mean_square)
    plugins = [technique] if isinstance(technique, AutoPrecision) else []
    callbacks = [technique] if technique is not None and not plugins else []
    run(model, data("vectors"), tmp_path, *callbacks, plugins=plugins)
    ((observed, ledger),) = asked
    for products, pointwise, operation_s, is_native, expected in rows:
        monkeypatch.setattr(support, lambda *_, native=is_native: DtypeSupport(native=native, why=""))
        time = {"operations": {"matrix products": products, "pointwise operations": pointwise}}
        time |= {"operation_s": operation_s, "num_operations": 9}
        advice = advise(replace(observed, time=time), ledger)
        assert {row["try"] for row in advice if row["saved_bytes"] is None} - {
            "callbacks=[DataPreload()]"
        } == expected


def test_what_is_in_use_is_not_suggested_nor_what_it_excludes(tmp_path: Any) -> None:
    used = run(layers(Net, mean_square), data(""), tmp_path, lightning_eff.MicroBatch(micro_batch_size=4))
    assert "MicroBatch" not in suggested(used)
    assert "InBackward" not in str(used["advice"])  # it excludes micro-batches
