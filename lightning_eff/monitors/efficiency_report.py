"""One table per run: what was asked, what was applied, and the time, FLOPs and memory that it took.

Printed at the end of `fit`, and written as `efficiency.json` (the ledger) and `report.html` beside the
run's other files; a run that fails writes both too, with the reason, and again when its last checkpoint is
on the disk. Measured are all training batches after the first ones, validation left out. Peak memory is the
allocator's where it keeps one; on the CPU it is the live bytes of the first batches, counted storage by
storage.
A compiled model is timed and not counted: it is not dispatched operation by operation.

Costs: a few Python calls a batch; the first batches run slower while they are counted.
Conflicts: none.
Source: MFU as in Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B, with counted instead
    of estimated FLOPs
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_eff.core import machine, rules
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.technique import Technique, asked, name_of, techniques
from lightning_eff.microbatching.lightning_loop import ExactStep
from lightning_eff.report import summary
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.report.losses import Losses
from lightning_eff.report.meter import Meter

LEDGER_FILE = "efficiency.json"
PAGE_FILE = "report.html"
CONFIG_FILE = "resolved.yaml"
"""What a recipe's run was built from; a plain Trainer has none."""


class EfficiencyReport(pl.Callback):
    """Report what the techniques of a run did and what the run cost.

    Args:
        dirpath: Folder for the ledger and the page; None takes the Trainer's log folder.
        num_warmup_batches: Batches at the start that are not timed, after the few that are counted.
        count_first_batches: Count floating-point operations, and on the CPU live bytes, in the first batches.
            Compiled modules are never counted; switch it off for a function compiled with `fullgraph=True`.

    Raises:
        ConfigError: `num_warmup_batches` is negative.

    Example:
        >>> trainer = pl.Trainer(callbacks=[EfficiencyReport()], logger=False, accelerator="cpu")
    """

    def __init__(
        self, *, dirpath: str | None = None, num_warmup_batches: int = 2, count_first_batches: bool = True
    ) -> None:
        if num_warmup_batches < 0:
            raise ConfigError(
                key="num_warmup_batches", value=num_warmup_batches, allowed="a whole number of at least 0"
            )
        self.dirpath = dirpath
        self.num_warmup_batches = num_warmup_batches
        self.count_first_batches = count_first_batches
        self.report: dict[str, Any] = {}
        """What was written, after `fit`."""
        self._asked: list[tuple[Technique, dict[str, Any]]] = []
        self._meter: Meter | None = None
        self._first_step = 0
        self._last_step = 0
        self._losses = Losses()
        self._folder = Path()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember what was asked, before anything settles what `auto` means."""
        rules.refuse_legacy(self, trainer)
        if stage == "fit":
            self.report = {}
            strategy = trainer.strategy
            candidates = [strategy.precision_plugin, strategy, strategy.checkpoint_io, *_callbacks(trainer)]
            self._asked = [(technique, asked(technique)) for technique in techniques(candidates)]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reports = [each for each in _callbacks(trainer) if isinstance(each, EfficiencyReport)]
        if next((each for each in reports if each.dirpath == self.dirpath), self) is not self:
            return  # that one writes the same files
        self._first_step = self._last_step = trainer.global_step
        self._losses = Losses()
        self._folder = self._folder_of(trainer)
        counted = self.count_first_batches and not is_compiled(pl_module)
        self._meter = Meter(
            trainer.strategy.root_device,
            trainer.profiler,  # pyright: ignore[reportAttributeAccessIssue]
            num_warmup_batches=self.num_warmup_batches,
            count_flops=counted,
            count_bytes=counted,
        )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self._meter.begin_batch(batch, pl_module, trainer.optimizers)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None:
            return
        step = trainer.global_step
        self._meter.end_batch(batch, num_steps=step - self._first_step)
        self._losses.add(step if step > self._last_step else step + 1, outputs, _num_shares(trainer))
        self._last_step = step

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.throughput.restart()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._finish(trainer, self._meter, status="finished", reason="")
            self._print()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        reason = f"{type(exception).__name__}: {exception}".splitlines()[0]
        stopped = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if self._meter is not None:
            meter = self._meter
            self._finish(trainer, meter, status="stopped" if stopped else "failed", reason=reason)
            # Callbacks after this one save checkpoints now, in the background too.
            _after_teardown(trainer.strategy, partial(self._update, trainer, meter))

    def _update(self, trainer: pl.Trainer, meter: Meter) -> None:
        """Write the report once more, with what techniques did since; print it."""
        self.report["ledger"] = summary.json_safe(self._ledger(trainer))
        self._write(meter)
        self._print()

    def _finish(self, trainer: pl.Trainer, meter: Meter, *, status: str, reason: str) -> None:
        self._meter = None
        meter.close()
        findings = {
            "title": "Efficiency report",
            "status": status,
            "reason": reason,
            "num_steps": trainer.global_step - self._first_step,
            "measured": meter.summary(dtype=_compute_dtype(trainer), world_size=trainer.world_size)
            | {"optimizer_state_bytes": _state_bytes(trainer)},
            "ledger": self._ledger(trainer),
            "losses": self._losses.curve(),
            "memory": {} if (held := meter.memory()) is None else held.as_dict(),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "environment": machine.describe(meter.device),
            "command": _command(),
        }
        self.report = summary.json_safe(findings)
        self._write(meter)

    def _ledger(self, trainer: pl.Trainer) -> list[dict[str, Any]]:
        ran = trainer.global_step > self._first_step
        return [_entry(technique, arguments, ran=ran) for technique, arguments in self._asked]

    def _folder_of(self, trainer: pl.Trainer) -> Path:
        """Return where to write; on all ranks, which Lightning lets agree on it.

        Without a logger nobody has made a folder for this run: what lies in the Trainer's is left as it is.
        """
        folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        if self.dirpath or trainer.loggers or not (folder / PAGE_FILE).exists():
            return folder
        return next(new for n in count(2) if not (new := folder / f"efficiency_{n}").exists())

    @rank_zero_only
    def _write(self, meter: Meter) -> None:
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEDGER_FILE).write_text(json.dumps(self.report, indent=1, allow_nan=False))
        resolved = folder / CONFIG_FILE
        config = resolved.read_text(encoding="utf-8") if resolved.is_file() else ""
        page = summary.report_page(self.report, meter.throughput, config)
        (folder / PAGE_FILE).write_text(page, encoding="utf-8")

    def _print(self) -> None:
        rank_zero_info("\n%s\n report: %s", summary.report_text(self.report), self._folder / PAGE_FILE)

    def outcome_of(self, name: str) -> dict[str, Any]:
        """Return the ledger's row of one technique after `fit`.

        Args:
            name: The technique's name, for example `callbacks/empty_cache`.

        Raises:
            KeyError: The run had no such technique.
        """
        rows = {row["technique"]: row for row in self.report.get("ledger", [])}
        return rows[name]


def _after_teardown(strategy: Strategy, act: Callable[[], None]) -> None:
    """Call `act` once, after the strategy's teardown: it waits for saves and follows all callbacks' hooks."""
    teardown = strategy.teardown

    def torn_down() -> None:
        vars(strategy).pop("teardown", None)
        try:
            teardown()
        finally:
            act()

    strategy.teardown = torn_down


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _state_bytes(trainer: pl.Trainer) -> int | None:
    """Return the bytes of all optimizers' state on this rank, None while there is none."""
    return sum(sum(state_bytes(optimizer).values()) for optimizer in trainer.optimizers) or None


def _entry(technique: Technique, arguments: dict[str, Any], *, ran: bool) -> dict[str, Any]:
    outcome = technique.outcome()
    effect = "applied" if outcome.effective else "no effect"
    return {
        "technique": name_of(technique),
        "asked": arguments,
        "status": effect if ran else "not run",
        "did": outcome.did,
        "numbers": dict(outcome.numbers),
    }


def _command() -> str:
    """Return the command line as it can be typed again, whichever way the program was started."""
    program = Path(sys.argv[0])
    ours = program.name == "lightning-eff" or program.parent.name == "lightning_eff"
    return shlex.join(["lightning-eff" if ours else sys.argv[0], *sys.argv[1:]])


def _num_shares(trainer: pl.Trainer) -> int:
    """Return what Lightning's own loop has divided a batch's loss by; ours leaves it as it was."""
    stock = trainer.lightning_module.automatic_optimization and not isinstance(
        trainer.fit_loop.epoch_loop.automatic_optimization, ExactStep
    )
    return trainer.accumulate_grad_batches if stock else 1


def _compute_dtype(trainer: pl.Trainer) -> torch.dtype:
    precision = str(trainer.precision)
    if "bf16" in precision:
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32
