"""One table per run: the techniques configured, what each did, and the time, FLOPs and memory of the run.

Printed at the end of `fit`, and written as `efficiency.json` (the ledger) and `report.html` next to the run's
other files. A run that fails writes both too, with the reason, and again when its last checkpoint is saved.
All training batches after the first ones are measured, validation excluded. Peak memory is the allocator's
where it keeps one; on the CPU it is the live bytes of the first batches, counted storage by storage. A
compiled model is timed and not counted: its operations are not dispatched one by one. Of bfloat16 weights the
fraction is shown that did not move in the first ten steps, with a warning above one half.

The Trainer's loggers get, every `log_every_n_steps` optimizer steps: `eff/learning_rate`, `eff/gradient_norm`
(of the whole gradient, before clipping), `eff/samples_per_second`, `eff/tokens_per_second`, `eff/data_wait`
(fraction of the time) and `eff/memory_mib` (peak of the first rank).

Costs: a few Python calls a batch; the first batches run slower while they are counted, and the first ten
    steps of bfloat16 weights, of which up to 4096 values a tensor are read; with a logger, one pass over the
    gradients in each step that is logged.
Conflicts: none.
Source: MFU as in Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B, with counted instead
    of estimated FLOPs
"""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core import machine, rules
from lightning_eff.core.arguments import CountOrZero, StrPath, check_arguments
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.dtypes import matmul_dtype
from lightning_eff.core.errors import ConflictWarning, NoEffectWarning, suggest_name
from lightning_eff.core.log_filters import IS_REPORT
from lightning_eff.core.technique import Technique, config_of, name_of
from lightning_eff.core.transformers_trainer import RejectsTransformersTrainer
from lightning_eff.microbatching.lightning_loop import ExactStep
from lightning_eff.report import summary
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.report.logged import LoggedFigures
from lightning_eff.report.losses import Losses
from lightning_eff.report.meter import Meter
from lightning_eff.report.unmoved import NUM_STEPS, Unmoved, UnmovedWeights

LEDGER_FILE = "efficiency.json"
PAGE_FILE = "report.html"
CONFIG_FILE = "resolved.yaml"
"""The composed config of a recipe's run; a plain Trainer has none."""


class EfficiencyReport(RejectsTransformersTrainer, pl.Callback):
    """Report what the techniques of a run did and what the run cost; of several, the first one reports.

    Args:
        dirpath: Folder for the ledger and the page; None takes the Trainer's log folder.
        num_warmup_batches: Batches at the start that are not timed, after the few that are counted.
        count_first_batches: Count floating-point operations, and on the CPU live bytes, in the first batches.
            Compiled modules are never counted; switch it off for a function compiled with `fullgraph=True`.

    Raises:
        ConfigError: `num_warmup_batches` is negative.

    Warns:
        ConflictWarning: Most bfloat16 weights did not move, because rounding to nearest loses their updates.

    Example:
        >>> trainer = pl.Trainer(callbacks=[EfficiencyReport()], logger=False, accelerator="cpu")
    """

    @check_arguments
    def __init__(
        self,
        *,
        dirpath: StrPath | None = None,
        num_warmup_batches: CountOrZero = 2,
        count_first_batches: bool = True,
    ) -> None:
        self.dirpath = dirpath
        self.num_warmup_batches = num_warmup_batches
        self.count_first_batches = count_first_batches
        self.report: dict[str, Any] = {}
        """What was written, after `fit`."""
        self._asked: list[tuple[Technique, dict[str, Any]]] = []
        self._meter: Meter | None = None
        self._logged: LoggedFigures | None = None
        self._watch: UnmovedWeights | None = None
        self._unmoved: Unmoved | None = None
        self._first_step = 0
        self._last_step = 0
        self._losses = Losses()
        self._folder = Path()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record the techniques' arguments before any `auto` is replaced by a value."""
        rules.reject_legacy_trainer(self, trainer)
        if stage == "fit":
            self.report = {}
            strategy = trainer.strategy
            callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            candidates = [strategy.precision_plugin, strategy, strategy.checkpoint_io, *callbacks]
            self._asked = [(each, config_of(each)) for each in candidates if isinstance(each, Technique)]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if next(each for each in callbacks if isinstance(each, EfficiencyReport)) is not self:
            if self.dirpath is not None:
                text = f"the report for {self.dirpath} has no effect: of several, the first report reports"
                warnings.warn(text, NoEffectWarning, stacklevel=2)
            return
        self._first_step = self._last_step = trainer.global_step
        self._losses = Losses()
        # On all ranks: Lightning broadcasts log_dir. Without a logger no folder was made for this run, and
        # an earlier report in the Trainer's folder is left as it is.
        folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        if not self.dirpath and not trainer.loggers and (folder / PAGE_FILE).exists():
            folder = next(new for n in count(2) if not (new := folder / f"efficiency_{n}").exists())
        self._folder = folder
        self._meter = Meter(
            trainer.strategy.root_device,
            trainer.profiler,  # pyright: ignore[reportAttributeAccessIssue]
            num_warmup_batches=self.num_warmup_batches,
            is_counted=self.count_first_batches,
            is_compiled=is_compiled(pl_module),
        )
        self._logged = LoggedFigures(trainer, self._meter)
        self._watch, self._unmoved = UnmovedWeights(trainer.optimizers), None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self._meter.begin_batch(batch, pl_module, trainer.optimizers)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._logged is not None:
            self._logged.begin_step(trainer, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None:
            return
        step = trainer.global_step
        self._meter.end_batch(batch, num_steps=step - self._first_step)
        if self._logged is not None:
            self._logged.end_batch(trainer)
        if step - self._first_step >= NUM_STEPS:
            self._count_unmoved(step - self._first_step)
        # Lightning's own loop divides a batch's loss by accumulate_grad_batches; ExactStep does not.
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        is_divided = pl_module.automatic_optimization and not isinstance(loop, ExactStep)
        divisor = trainer.accumulate_grad_batches if is_divided else 1
        self._losses.add(step if step > self._last_step else step + 1, outputs, divisor)
        self._last_step = step

    def _count_unmoved(self, num_steps: int) -> None:
        """Count once, and free what was kept for it."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._unmoved = watch.finish(num_steps)
        if self._unmoved is not None and (text := self._unmoved.warning()):
            warnings.warn(text, ConflictWarning, stacklevel=2)

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
        if self._meter is None:
            return
        meter, strategy = self._meter, trainer.strategy
        is_stop = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        reason = f"{type(exception).__name__}: {exception}".splitlines()[0]
        self._finish(trainer, meter, status="stopped" if is_stop else "failed", reason=reason)
        teardown = strategy.teardown

        def teardown_then_update() -> None:
            vars(strategy).pop("teardown", None)
            try:
                teardown()
            finally:
                self._write(trainer, meter)
                self._print()

        # Callbacks after this one save checkpoints now, in the background too; the strategy's teardown waits
        # for these saves and follows all callbacks' hooks.
        strategy.teardown = teardown_then_update

    def _finish(self, trainer: pl.Trainer, meter: Meter, *, status: str, reason: str) -> None:
        self._meter = self._logged = None
        meter.close()
        self._count_unmoved(trainer.global_step - self._first_step)
        dtype, held = matmul_dtype(str(trainer.precision), meter.device.type), meter.memory()
        # The command line in a form that can be typed again, however the program was started.
        program = Path(sys.argv[0])
        is_ours = program.name == "lightning-eff" or program.parent.name == "lightning_eff"
        command = shlex.join(["lightning-eff" if is_ours else sys.argv[0], *sys.argv[1:]])
        optimizer_bytes = sum(sum(state_bytes(optimizer).values()) for optimizer in trainer.optimizers)
        findings = {
            "title": "Efficiency report",
            "status": status,
            "reason": reason,
            "num_steps": trainer.global_step - self._first_step,
            "first_step": self._first_step,
            "precision": str(trainer.precision),
            "measured": meter.summary(dtype=dtype, world_size=trainer.world_size)
            | {"optimizer_state_bytes": optimizer_bytes or None},
            "ledger": [],
            "losses": self._losses.curve(),
            "memory": {} if held is None else asdict(held),
            "attention": [row.as_dict() for row in meter.probe.attention],
            "unmoved": {} if self._unmoved is None else self._unmoved.as_dict(),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "environment": machine.machine_info(meter.device),
            "command": command,
        }
        self.report = summary.json_safe(findings)
        self._write(trainer, meter)

    def _print(self) -> None:
        text = summary.report_text(self.report)
        rank_zero_info("\n%s\n report: %s", text, self._folder / PAGE_FILE, extra={IS_REPORT: True})

    def _write(self, trainer: pl.Trainer, meter: Meter) -> None:
        """Update the ledger, one row a technique, and write both files."""
        rows: list[dict[str, Any]] = []
        for technique, arguments in self._asked:
            outcome = technique.outcome()
            status = "applied" if outcome.effective else "no effect"
            status = status if trainer.global_step > self._first_step else "not run"
            row = {"technique": name_of(technique), "asked": arguments, "status": status}
            rows.append(row | {"did": outcome.did, "numbers": dict(outcome.numbers)})
        self.report["ledger"] = summary.json_safe(rows)
        if not trainer.is_global_zero:
            return
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        resolved = folder / CONFIG_FILE
        config = resolved.read_text(encoding="utf-8") if resolved.is_file() else ""
        labels: Any = yaml.safe_load(config)
        if isinstance(labels, dict):
            self.report |= {key: labels.get(key) for key in ("task_name", "tags")}
        (folder / LEDGER_FILE).write_text(json.dumps(self.report, indent=1, allow_nan=False))
        page = summary.report_page(self.report, meter.throughput, config)
        (folder / PAGE_FILE).write_text(page, encoding="utf-8")

    def outcome_of(self, name: str) -> dict[str, Any]:
        """Return the ledger's row of one technique, for example `callbacks/empty_cache`, after `fit`.

        Raises:
            KeyError: The run had no such technique.
        """
        rows = {row["technique"]: row for row in self.report.get("ledger", [])}
        if name not in rows:
            text = f"{name!r}: {suggest_name(name, rows)}"
            raise KeyError(text)
        return rows[name]
