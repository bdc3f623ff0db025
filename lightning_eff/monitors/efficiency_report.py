"""Report a run's techniques, the effect of each technique, and the run's time, FLOPs and memory.

The report is printed at the end of `fit`. The report is also written as `efficiency.json` (the ledger) and
`report.html` next to the run's other files. A failed run writes its report too, with the reason for the
failure. The report of a failed run is updated after the last checkpoint. All training batches except the
first few are timed; validation is excluded. Peak memory is the allocator's peak. On a CPU, the allocator
records no peak, so peak memory is the maximum of live bytes in the first batches, counted storage by storage.
Compiled models are timed, but their operations are not counted, because a compiled graph does not dispatch
each operation. MFU is shown for GPUs whose peak FLOPs are published. Parts of a step, modules and kinds of
operations are timed in eleven later batches (report/step_time.py). If a notebook displays this callback, the
notebook shows the page. After an OOM error on CUDA, `memory_snapshot.pickle` lists every block of the
allocator. With `record_memory_history`, the snapshot also has the stack trace of each allocation, and
allocations are slower.

The Trainer's loggers get these figures every `log_every_n_steps` optimizer steps: `eff/learning_rate`,
`eff/gradient_norm` (of the full gradient, before clipping), `eff/samples_per_second`,
`eff/tokens_per_second`, `eff/data_wait` (fraction of the time) and `eff/memory_mib` (peak of the first rank).

Saves: nothing.
Costs: a few Python calls per batch. The first batches run slower because their operations are counted. Three
    later batches run slower because their modules or operations are timed. The throughput excludes all slower
    batches. If the Trainer has a logger, each logged step makes one more pass over the gradients.
When not: batches of less than a millisecond.
Conflicts: none.
Source: MFU as in Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B, with counted instead
    of estimated FLOPs
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core import allocator, machine, random_states, rules
from lightning_eff.core.arguments import CountOrZero, StrPath, check_arguments
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.dtypes import matmul_dtype
from lightning_eff.core.errors import ConfigError, NoEffectWarning, is_out_of_memory, suggest_name
from lightning_eff.core.log_filters import REPORTS
from lightning_eff.core.managed import set_up_monitor, skip_hook
from lightning_eff.core.secret_values import hide_secrets
from lightning_eff.core.technique import Technique, config_of, name_of
from lightning_eff.core.text import json_safe, printable
from lightning_eff.microbatching import splitting
from lightning_eff.microbatching.mean_check import MAX_SAMPLES
from lightning_eff.report import display, files
from lightning_eff.report.advice import Observed, advise
from lightning_eff.report.history import Losses, Validation
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.report.logged import LoggedFigures
from lightning_eff.report.meter import Meter

INTERRUPTED = "interrupted"


class EfficiencyReport(pl.Callback):
    """Report the effect of a run's techniques and the cost of the run.

    If a Trainer has several `EfficiencyReport` callbacks, only the first callback writes a report.

    Args:
        dirpath: Folder for the ledger and the page; if None, the Trainer's log folder.
        num_warmup_batches: Number of further batches that are not timed, after the counted first batches.
        count_first_batches: Count the floating-point operations of the first batches and, on a CPU, their
            live bytes. Compiled modules are never counted. Set this to False if the model calls a function
            that is compiled with `fullgraph=True`.
        baseline: Folder or `efficiency.json` of another run, with which the page compares this run.
        record_memory_history: Record the stack trace of each CUDA allocation, for `memory_snapshot.pickle`.

    Raises:
        ConfigError: `num_warmup_batches` is negative, or `baseline` is not a report.

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
        baseline: StrPath | None = None,
        record_memory_history: bool = False,
    ) -> None:
        self.dirpath = dirpath
        self.num_warmup_batches = num_warmup_batches
        self.count_first_batches = count_first_batches
        self.baseline = baseline
        self.record_memory_history = record_memory_history
        self.recipe = ""
        """Name of the run's recipe, for the title."""
        self.meter: Meter | None = None
        """Meter of the current `fit`; None outside of `fit`."""
        self.report: dict[str, Any] = {}
        """Content of `efficiency.json`, after `fit`."""
        self._asked: list[tuple[Technique, dict[str, Any]]] = []
        self._baseline = files.read_baseline(baseline) if baseline else None
        self._logged: LoggedFigures | None = None
        self._first_step, self._last_step, self._began_s = 0, 0, 0.0
        self._losses, self._validation = Losses(), Validation()
        self._random_states: list[random_states.RandomStates] = []
        """Random states at the start of the first two batches."""
        self._folder = Path()
        self._sample: Any = None
        """A few samples of the first batch, to test whether a batch can be split."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record the techniques' arguments before any `auto` is replaced by a value."""
        vars(self).pop("on_train_batch_start", None)  # set by an earlier fit
        set_up_monitor(self, trainer)
        if stage == "fit":
            self.report = {}
            strategy = trainer.strategy
            candidates = [
                strategy.precision_plugin,
                strategy,
                strategy.checkpoint_io,
                *rules.callbacks_of(trainer),
            ]
            # Techniques in the order in which they act: precision, strategy, files, callbacks.
            self._asked = [(each, config_of(each)) for each in candidates if isinstance(each, Technique)]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if next(c for c in rules.callbacks_of(trainer) if isinstance(c, EfficiencyReport)) is not self:
            if self.dirpath is not None:
                text = f"the report for {self.dirpath} has no effect: of several, the first report reports"
                warnings.warn(text, NoEffectWarning, stacklevel=2)
            return
        self._first_step = self._last_step = trainer.global_step
        self._losses, self._validation = Losses(), Validation()
        self._random_states.clear()
        # All ranks read log_dir, because Lightning broadcasts the value. Without a logger, all runs share the
        # Trainer's folder, so an earlier report there must not be overwritten.
        folder = self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        if not self.dirpath and not trainer.loggers and (folder / files.PAGE_FILE).exists():
            self._folder = next(new for n in count(2) if not (new := folder / f"efficiency_{n}").exists())
        if self.dirpath and trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)  # fail before the run, not at its end
        self.meter = Meter(
            trainer.strategy.root_device,
            trainer.fit_loop.epoch_loop,
            num_warmup_batches=self.num_warmup_batches,
            is_counted=self.count_first_batches,
            is_compiled=is_compiled(pl_module),
            strategy=trainer.strategy,
        )
        self._began_s = time.perf_counter()
        self._logged = LoggedFigures(trainer, self.meter)
        if self.record_memory_history:
            allocator.record_history(self.meter.device, is_on=True)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.meter is None:
            return
        # For `compare`, the random states before the first two batches show whether a batch draws random
        # numbers.
        if len(self._random_states) < 2:
            self._random_states.append(random_states.capture(self.meter.device))
        if self.meter.recorder is not None and not self.meter.probe.num_batches:
            self._sample = _few_samples(batch)
        self.meter.begin_batch(batch, pl_module, trainer.optimizers)
        if not self.meter.is_probing and len(self._random_states) == 2:
            # Skip this hook in later batches, where it would do nothing but cost time.
            skip_hook(self, trainer, "on_train_batch_start", of=EfficiencyReport)

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
        if self.meter is None:
            return
        step = trainer.global_step
        self.meter.end_batch(batch, num_steps=step - self._first_step)
        if self._logged is not None:
            self._logged.end_batch(trainer, step)
        # In automatic optimization Lightning divides a batch's loss by accumulate_grad_batches.
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        # A batch in the middle of an accumulation window belongs to the next step.
        self._losses.add(step if step > self._last_step else step + 1, outputs, divisor)
        self._last_step = step

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.meter is not None:
            self._validation.begin(trainer.callback_metrics)
            self.meter.pause(is_paused=True)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.meter is None:
            return
        self._validation.end(trainer.global_step, trainer.callback_metrics)
        self.meter.pause(is_paused=False)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.meter is not None:
            self._finish(trainer, self.meter, status="finished", reason=_limit_of(trainer))
            self._print()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self.meter is None:
            return
        meter, strategy = self.meter, trainer.strategy
        # A run that was stopped from outside did not fail.
        stops = {KeyboardInterrupt: INTERRUPTED, SIGTERMException: "terminated by SIGTERM"}
        stop = next((text for kind, text in stops.items() if isinstance(exception, kind)), "")
        reason = stop or hide_secrets(f"{type(exception).__name__}: {exception}".splitlines()[0])
        # Write the snapshot before anything else allocates or frees memory.
        has_snapshot = is_out_of_memory(exception) and files.write_snapshot(meter.device, self._folder)
        self._finish(trainer, meter, status="stopped" if stop else "failed", reason=reason)
        self.report |= {"memory_snapshot": files.SNAPSHOT_FILE} if has_snapshot else {}
        teardown = strategy.teardown

        def teardown_then_update() -> None:
            vars(strategy).pop("teardown", None)
            try:
                teardown()
            finally:
                self._write(trainer)
                self._print()

        # Later callbacks may save checkpoints now, even in the background. The strategy's teardown waits for
        # background saves, and runs after all callbacks' hooks.
        strategy.teardown = teardown_then_update

    def _finish(self, trainer: pl.Trainer, meter: Meter, *, status: str, reason: str) -> None:
        series = meter.throughput.series() | ({} if self._logged is None else self._logged.history.series())
        # Reset the meter first, so that `on_exception` does not report again after an error below.
        self.meter = self._logged = None
        meter.close()
        if self.record_memory_history:
            allocator.record_history(meter.device, is_on=False)
        dtype, held = matmul_dtype(str(trainer.precision), meter.device.type), meter.memory()
        optimizer_bytes = sum(sum(state_bytes(optimizer).values()) for optimizer in trainer.optimizers)
        measured = meter.summary(dtype=dtype, world_size=trainer.world_size)
        findings = {
            "title": files.run_title(self._folder, self.recipe, trainer.lightning_module),
            "status": status,
            "reason": reason,
            "num_steps": trainer.global_step - self._first_step,
            "first_step": self._first_step,
            "fit_s": time.perf_counter() - self._began_s,
            "precision": str(trainer.precision),
            "draws_random_numbers": any(
                random_states.differing(states, self._random_states[0]) for states in self._random_states[1:]
            ),
            "measured": measured | {"optimizer_state_bytes": optimizer_bytes or None},
            "ledger": [],
            "losses": self._losses.curve(),
            "series": series,
            "validation": self._validation.series(),
            "memory": {} if held is None else asdict(held),
            # After a device error, reading times from the device would raise the error again.
            "time": {} if status == "failed" or meter.times is None else meter.times.summary(),
            "attention": [row.as_dict() for row in meter.probe.attention],
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "environment": machine.machine_info(meter.device),
            "command": machine.command_line(),
            "baseline": self._baseline,
        }
        self.report = json_safe(findings)
        self._write(trainer)
        # SIGTERM leaves a process too little time for advice.
        if (status == "finished" or reason == INTERRUPTED) and trainer.is_global_zero:
            run = Observed(
                trainer=trainer,
                recorder=meter.recorder if meter.probe.num_batches else None,
                measured=measured,
                sample=self._sample,
                num_samples=meter.samples_of_first_batch,
                num_tokens=meter.tokens_of_first_batch,
                attention=meter.probe.attention,
                time=self.report["time"],
            )
            self.report["advice"] = advise(run, self.report["ledger"])
            files.write_report(self._folder, self.report)
        self._sample = None

    def _print(self) -> None:
        text, page = display.report_text(self.report), str(self._folder / files.PAGE_FILE)
        rank_zero_only(REPORTS.info)("\n%s\n report: %s", printable(text), printable(page))

    def _write(self, trainer: pl.Trainer) -> None:
        """Update the ledger (one row per technique), and write `efficiency.json` and `report.html`."""
        rows: list[dict[str, Any]] = []
        for technique, arguments in self._asked:
            outcome = technique.outcome()
            # Before the first optimizer step, a technique cannot have had an effect.
            has_run = trainer.global_step > self._first_step
            status = ("applied" if outcome.effective else "no effect") if has_run else "not run"
            row = {"technique": name_of(technique), "asked": arguments, "status": status}
            row |= {"exact": getattr(technique, "exact", False) is True}
            rows.append(row | {"did": outcome.did, "numbers": dict(outcome.numbers)})
        self.report["ledger"] = json_safe(rows)
        if trainer.is_global_zero:
            self.report |= files.labels(self._folder)
            files.write_report(self._folder, self.report)

    def _repr_html_(self) -> str | None:
        """Return the page for a notebook; None before the end of `fit`."""
        return display.notebook_frame(self.report) if self.report else None

    def outcome_of(self, name: str) -> dict[str, Any]:
        """Return the ledger's row of one technique, for example `callbacks/empty_cache`, after `fit`.

        Raises:
            KeyError: The run had no such technique.
        """
        rows = {row["technique"]: row for row in self.report.get("ledger", [])}
        if name not in rows:
            raise KeyError(f"{name!r}: {suggest_name(name, rows)}")
        return rows[name]


def _limit_of(trainer: pl.Trainer) -> str:
    """Return the limit or the callback that ended a fit; empty if neither ended it."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"max_steps={trainer.max_steps} reached"
    if trainer.should_stop:  # check before max_epochs: Lightning counts an incomplete epoch
        stopping = [
            type(each).__name__
            for each in rules.callbacks_of(trainer)
            if (isinstance(each, EarlyStopping) and each.stopping_reason_message)
            or (isinstance(each, Timer) and (each.time_remaining() or 1) <= 0)
        ]
        return f"stopped early by {stopping[0] if stopping else 'trainer.should_stop'}"
    limit = trainer.max_epochs
    return f"max_epochs={limit} reached" if limit is not None and 0 <= limit <= trainer.current_epoch else ""


def _few_samples(batch: Any) -> Any:
    """Return a copy of the first samples, as a smaller batch; None if the batch cannot be split."""
    try:
        few = splitting.split(batch, MAX_SAMPLES)[0]
    except (ConfigError, splitting.AmbiguousBatchError):
        return None
    return apply_to_collection(few.batch, Tensor, lambda x: x.detach().clone()) if few.num_samples else None
