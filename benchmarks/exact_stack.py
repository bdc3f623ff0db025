"""Compare a GPT with exact techniques to plain Lightning: peak memory, CPU time and losses.

The model has 12 layers, d_model=512, 8 heads, 50,304 tokens of vocabulary and 512 positions, in float32 with
AdamW. The run `exact` recomputes its blocks, computes its loss in tiles, and takes the steps of fused AdamW
in the backward pass. The peak is predicted for batch sizes 4 and 16. For batch size 4 the peak is also
measured, by counting live bytes in the first two steps. The time is the CPU time of the fastest later step on
one thread.

    OMP_NUM_THREADS=1 python benchmarks/exact_stack.py --json benchmarks/exact_stack.json
"""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from _common import QUIET, arguments, publish
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.core.text import text_table
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.prediction.predict import predict

FULL: dict[str, int] = {
    "vocab_size": 50_304, "context_length": 512, "d_model": 512, "num_layers": 12, "num_heads": 8,
}  # fmt: skip
SMALL: dict[str, int] = FULL | {"vocab_size": 512, "context_length": 32, "d_model": 64, "num_layers": 2}
COUNTED_STEPS = 2
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}


class Plain(GPT):
    """The model with its optimizer."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class Steps(pl.Callback):
    """Records the CPU seconds and the loss of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._began = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.process_time()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds.append(time.process_time() - self._began)
        self.losses.append(float(outputs["loss"]))


def techniques(who: str) -> list[pl.Callback]:
    """Return the callbacks of a run."""
    if who == "plain":
        return []
    fused = functools.partial(torch.optim.AdamW, fused=True)
    in_backward = functools.partial(InBackward, optimizer=fused, **ADAMW)
    return [GradientCheckpointing(), TiledLoss(), OptimizerChoice(optimizer=in_backward)]


def make_trainer(who: str, steps: int, *more: pl.Callback) -> pl.Trainer:
    """Return a Trainer with the techniques of the run `plain` or `exact`."""
    return pl.Trainer(max_steps=steps, callbacks=[*techniques(who), *more], **QUIET)


def batches(sizes: dict[str, int], batch_size: int, count: int) -> DataLoader[Any]:
    """Return a loader of random tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, count * batch_size, sizes["context_length"])
    tokens = torch.randint(0, sizes["vocab_size"], shape, generator=generator)
    return DataLoader(TensorDataset(*tokens), batch_size=batch_size)


def predicted_bytes(who: str, sizes: dict[str, int], batch_size: int) -> tuple[int, float]:
    """Return the predicted peak and the seconds that the prediction took."""
    began = time.perf_counter()
    batch = next(iter(batches(sizes, batch_size, 1)))
    found = predict(functools.partial(Plain, **sizes), batch, trainer=lambda: make_trainer(who, 10, Steps()))
    if found.peak is None:
        raise RuntimeError(found.reason)
    return found.peak.num_bytes, time.perf_counter() - began


def run(who: str, sizes: dict[str, int], batch_size: int, steps: int, folder: str) -> tuple[int, Steps]:
    """Train; return the measured peak, and the time and loss of each step."""
    noted, report = Steps(), EfficiencyReport(dirpath=folder)
    trainer = make_trainer(who, COUNTED_STEPS + steps, noted, report)
    torch.manual_seed(1)
    trainer.fit(Plain(**sizes), batches(sizes, batch_size, COUNTED_STEPS + steps))
    return report.report["memory"]["num_bytes"], noted


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per run."""
    header = ["who", "MiB at 16, predicted", "of plain", "at 4, predicted", "measured", "CPU s", "of plain"]
    cells = [
        [
            r["who"], f"{r['predicted_bytes_at_16'] / 2**20:.1f}", f"{r['peak_ratio_at_16']:.3f}",
            f"{r['predicted_bytes_at_4'] / 2**20:.1f}", f"{r['measured_bytes_at_4'] / 2**20:.1f}",
            f"{r['cpu_s_of_a_step']:.2f}", f"{r['time_ratio_at_4']:.2f}",
            " ".join(f"{loss:.6f}" for loss in r["losses"]),
        ]
        for r in content["rows"]
    ]  # fmt: skip
    return text_table([*header, "losses"], cells)


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="a model of two layers")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes = SMALL if given.small else FULL
    rows: list[dict[str, Any]] = []
    for who in ("plain", "exact"):
        with tempfile.TemporaryDirectory() as folder:
            measured, noted = run(who, sizes, 4, given.steps, folder)
        row: dict[str, Any] = {"who": who, "measured_bytes_at_4": measured}
        for batch_size in (4, 16):
            found, seconds = predicted_bytes(who, sizes, batch_size)
            row |= {f"predicted_bytes_at_{batch_size}": found, f"seconds_to_predict_{batch_size}": seconds}
        row |= {"cpu_s_of_a_step": min(noted.seconds[COUNTED_STEPS:]), "losses": noted.losses}
        rows.append(row)
    plain = rows[0]
    for row in rows:
        row["peak_ratio_at_16"] = row["predicted_bytes_at_16"] / plain["predicted_bytes_at_16"]
        row["time_ratio_at_4"] = row["cpu_s_of_a_step"] / plain["cpu_s_of_a_step"]
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
