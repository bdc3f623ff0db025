"""Measure the CPU time and the temporary bytes of one step of each optimizer, relative to AdamW in a loop.

The model is a GPT of 4 layers, d_model=256 and 8,192 tokens of vocabulary (5.4 M parameters, 51 tensors) in
float32, with constant gradients. The optimizers alternate (A B C A B C) on one thread, and the table shows
the smallest of `--repeats` times. Temporary bytes are the live bytes in addition to parameters, gradients and
state. The compiled steps of torchao are timed, but their bytes are not counted.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py --json benchmarks/optimizers.json
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from _common import arguments, publish, rows_table
from lightning_eff.core.optimization.build import build
from lightning_eff.models.gpt import GPT
from lightning_eff.optimizer.adamw_bf16 import AdamWBf16
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.optimizer.muon import Muon
from lightning_eff.report.live_bytes import LiveBytes, state_bytes, tensors_in

TITLES = {
    "step_ms": "CPU ms a step", "times_faster": "x loop", "state_bytes_per_parameter": "state B/parameter",
    "temporary_bytes_per_parameter": "temporaries B/parameter",
}  # fmt: skip
LIBRARIES = ("pytorch_optimizer", "schedulefree", "bitsandbytes", "torchao")


def optional(module: str, name: str) -> Callable[..., Any] | None:
    """Return a factory of a library's optimizer; None if the library is not installed."""
    try:
        return functools.partial(getattr(importlib.import_module(module), name), lr=1e-4)
    except ModuleNotFoundError:
        return None


def factories() -> dict[str, Callable[..., Any] | None]:
    """Return the compared optimizers; the first optimizer is the baseline."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
    return {
        "adamw loop": functools.partial(adamw, foreach=False, fused=False),
        "adamw foreach": functools.partial(adamw, foreach=True),
        "adamw fused": functools.partial(adamw, fused=True),
        "in_backward": functools.partial(InBackward, lr=1e-4),
        "cpu_offload": functools.partial(CpuOffload, lr=1e-4),
        "adamw_bf16": functools.partial(AdamWBf16, lr=1e-4),
        "sgd": functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
        "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-4),
        "muon": functools.partial(Muon, lr=1e-4),
        "lion": optional("pytorch_optimizer", "Lion"),
        "schedule_free": optional("schedulefree", "AdamWScheduleFree"),
        "adamw_8bit_bnb": optional("bitsandbytes.optim", "AdamW8bit"),
        "adamw_8bit": optional("torchao.optim", "AdamW8bit"),
    }


class Trial:
    """One optimizer and its own model."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = GPT(vocab_size=8192, context_length=64, d_model=256, num_layers=4, num_heads=4)
        self.optimizer: Any = build(self.model, factory)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.best_s = float("inf")
        self.step()

    def give_gradients(self) -> None:
        """Set the gradient of every parameter."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    def step(self) -> float:
        """Take one step, and return its CPU seconds."""
        self.give_gradients()
        start = time.process_time()
        self.optimizer.step()
        elapsed = time.process_time() - start
        self.best_s = min(self.best_s, elapsed)
        return elapsed

    def temporaries(self) -> int:
        """Return the peak bytes that a step allocates temporarily."""
        self.give_gradients()
        live = LiveBytes()
        for parameter in self.model.parameters():
            live.add([parameter, parameter.grad])
        live.add(tensors_in(list(self.optimizer.state.values())))
        before = live.now_bytes
        with live:
            self.optimizer.step()
        return live.peak_bytes - before


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per optimizer."""
    return rows_table(content["rows"], dict.fromkeys(TITLES, ".2f"), TITLES, missing="not counted")


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="optimizers in addition to the base; all by default"
    )
    given = parser.parse_args()
    names = list(factories()) if given.only is None else ["adamw loop", *given.only]
    trials = {name: Trial(factory) for name, factory in factories().items() if name in names and factory}
    for _ in range(given.repeats):
        for trial in trials.values():
            trial.step()
    base = trials["adamw loop"].best_s
    rows = []
    for name, trial in trials.items():
        num_parameters = sum(parameter.numel() for parameter in trial.model.parameters())
        held = sum(state_bytes(trial.optimizer).values())
        temporaries = None if name == "adamw_8bit" else trial.temporaries()
        rows.append(
            {
                "optimizer": name,
                "step_ms": trial.best_s * 1e3,
                "times_faster": base / trial.best_s,
                "state_bytes_per_parameter": held / num_parameters,
                "temporary_bytes_per_parameter": None
                if temporaries is None
                else temporaries / num_parameters,
            }
        )
    publish(given.json, {"rows": rows}, table, *LIBRARIES)


if __name__ == "__main__":
    main()
