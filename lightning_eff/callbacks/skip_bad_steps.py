"""Skip optimizer steps whose loss or gradient is not finite, or whose gradient norm is an outlier.

One corrupt sample can give a NaN loss, or a gradient many times as large as usual, and the update may ruin
the run. This callback computes the gradient norm before clipping, and skips the update if the norm is NaN or
infinite. With `max_deviations`, the callback also skips outliers. An outlier is a norm that exceeds the
median of the last norms by more than `max_deviations` robust standard deviations. One robust standard
deviation is 1.4826 times the median absolute deviation, and at least 1 % of the median.

A skipped step leaves no trace. Weights and optimizer state are not updated; buffers, random states, logged
values and the module's attributes are restored. Neither `global_step` nor the learning-rate schedule
advances. The run continues, bit for bit, as if the loader did not have the batches of this step. The log and
the report list the skipped batches. All ranks make the same decision, because all ranks have the same
gradient. A NaN loss on one rank makes the gradient NaN on all ranks. Steps that a float16 loss scaler skips
are not counted.

After `max_in_a_row` consecutive skipped steps, the run saves a checkpoint with the weights from before these
steps, and stops with an error.

Saves: a run that one bad batch would ruin.
Costs: in each step, one pass over the gradients and one wait for the device, to read the norm. Each step also
    copies the buffers and the modules' attributes, which takes 0.5 ms of Python for a model of one layer.
When not: bad batches are frequent; then repair the data.
Conflicts: manual optimization, DeepSpeed, Lightning's FSDPStrategy, and optimizers that free gradients in the
    backward pass are rejected. A bad gradient ends the run if the optimizer has already changed weights in
    this step, as LBFGS does in a line search. The Trainer's own `accumulate_grad_batches` works like
    `callbacks/gradient_accumulation`. A skipped step does not undo changes to custom objects or to tensors in
    containers; it ends the run if `training_step` has changed a tensor of more than 1 MiB that is an
    attribute but no buffer. `on_train_batch_end` runs for skipped steps too. A learning-rate schedule with a
    `frequency` above 1 counts batches, including skipped ones.
Source: none
"""

from __future__ import annotations

import functools
import math
import statistics
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.arguments import Count, Positive, check_arguments
from lightning_eff.core.call_state import version
from lightning_eff.core.checkpoint_stamp import save_nothing_on_exception
from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.optimization.composite import FreesGradients
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.core.technique import Facts, Outcome, Rule
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.snapshot import StepSnapshot

MIN_NORMS = 16
"""Minimum number of earlier norms before a norm can be an outlier."""
MIN_DEVIATION = 0.01
"""Minimum deviation, as a fraction of the median, because equal norms would have a deviation of 0."""
MAX_SHOWN = 5
_OFF = Remedy("~callbacks.skip_bad_steps", "remove SkipBadSteps")


class SkipBadSteps(Managed):
    """Skip steps that would ruin a run.

    Args:
        max_deviations: Skip a step whose gradient norm exceeds the median by more than this many robust
            standard deviations. If None, only steps whose norm is not finite are skipped.
        last_n_steps: Number of previous steps whose norms give the median.
        max_in_a_row: Number of consecutive skipped steps that stops the run; None never stops the run.

    Raises:
        ConfigError: An argument is outside its range, the optimizer frees gradients in the backward pass, or
            the optimizer has changed weights before a bad gradient.
        GradientError: `max_in_a_row` consecutive steps were skipped.

    Example:
        >>> trainer = pl.Trainer(callbacks=[SkipBadSteps(max_deviations=10)], logger=False, accelerator="cpu")
        >>> SkipBadSteps(max_deviations=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: max_deviations=0: expected a finite number above 0, or None
    """

    @check_arguments
    def __init__(
        self,
        *,
        max_deviations: Positive | None = None,
        last_n_steps: Count = 128,
        max_in_a_row: Count | None = 5,
    ) -> None:
        self.max_deviations = max_deviations
        self.last_n_steps = last_n_steps
        self.max_in_a_row = max_in_a_row
        self._norms: deque[float] = deque(maxlen=last_n_steps)
        self._skipped: list[dict[str, Any]] = []
        self._num_steps = self._num_in_row = 0

    def facts(self) -> Facts:
        """Reject techniques that hide gradients from callbacks, and techniques that step by themselves."""
        reasons = {
            "run/manual_optimization": "the module decides itself when it steps",
            "strategy/deepspeed_zero": "DeepSpeed's engine steps, with gradients that no callback reads",
            "lightning/DeepSpeedStrategy": "DeepSpeed's engine steps, with gradients that no callback reads",
            "lightning/FSDPStrategy": "each rank has only a part of the gradient, so their norms differ",
            "optimizer/in_backward": "gradients are used and freed before their norm is known",
        }
        return Facts(
            excludes=tuple(
                Rule(name=name, reason=reason, remedies=(_OFF,)) for name, reason in reasons.items()
            )
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)
            self._skipped, self._num_steps, self._num_in_row = [], 0, 0
            self._norms.clear()
            self._is_bad = self._is_skipped = False
            self._gated: Optimizer | None = None
            self._loop = lightning_loop.install(trainer)
            self.cleanup.callback(lightning_loop.uninstall, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        if isinstance(optimizer, FreesGradients):
            raise _optimizer_error(optimizer, "one that keeps gradients until it steps")
        # Lightning's collection of values that `self.log` received in this epoch.
        logged: Any = trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._snapshot = StepSnapshot(pl_module, trainer.strategy.root_device, logged)
        # A loss scaler itself skips steps whose gradient is not finite, and lowers its scale.
        self._has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._loop.before_window.append(lambda: self._begin(trainer))
        self._loop.is_step_skipped = lambda: self._is_skipped

    def _begin(self, trainer: pl.Trainer) -> None:
        """Save the state before the first batch of a step."""
        self._is_bad = self._is_skipped = False
        if trainer.optimizers[0] is not self._gated:  # in the first step, or if a callback has replaced it
            self._gate(trainer.optimizers[0], trainer)
        self._first_batch = trainer.fit_loop.epoch_loop.batch_idx
        self._snapshot.keep()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        # The factor is 1 for a finite loss, otherwise NaN. So other ranks see a bad loss in the gradient.
        factor = 1 + 0 * loss.detach()
        loss.register_hook(lambda gradient: gradient * factor)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        groups = optimizer.param_groups
        gradients = [each.grad for group in groups for each in group["params"] if each.grad is not None]
        # Add the entries of a sparse gradient that have the same index, because the gradient is their sum.
        gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        # A norm in float16 would overflow above 65504.
        norm = get_total_norm([each.float() if each.dtype == torch.float16 else each for each in gradients])
        # Sharded gradients give a partial norm on each rank, so combine the partial norms.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._norm = float(norm)  # waits for the device
        is_finite = math.isfinite(self._norm)
        self._is_bad = self._norm > self._limit() if is_finite else not self._has_scaler

    def _limit(self) -> float:
        """Return the largest norm that is not an outlier."""
        if self.max_deviations is None or len(self._norms) < min(MIN_NORMS, self.last_n_steps):
            return math.inf
        median = statistics.median(self._norms)
        # For a normal distribution, 1.4826 times the median absolute deviation is the standard deviation.
        deviation = 1.4826 * statistics.median(abs(norm - median) for norm in self._norms)
        return median + self.max_deviations * max(deviation, MIN_DEVIATION * median)

    def _gate(self, optimizer: Optimizer, trainer: pl.Trainer) -> None:
        """Replace the optimizer's `step`, for this fit, by a function that skips updates with a bad gradient.

        Why not set gradients to None instead: some optimizers (schedule-free) still update their state.
        """
        step: Callable[..., Any] = optimizer.step

        @functools.wraps(step)  # also copies a learning-rate scheduler's mark on `step`
        def gated(_: Optimizer, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            # If the optimizer moves weights before it calls its closure, the step cannot be undone.
            versions = [version(parameter) for parameter in parameters]
            self._num_steps += 1

            def evaluated() -> Any:
                loss = None if closure is None else closure()
                if self._is_bad:
                    raise _BadStep(loss)
                return loss

            try:
                if closure is None:
                    evaluated()
                    found = step(**keywords)
                else:
                    found = step(closure=evaluated, **keywords)
            except _BadStep as bad:
                if versions != [version(parameter) for parameter in parameters]:
                    save_nothing_on_exception(trainer)
                    raise _optimizer_error(optimizer, "one that moves no weights before it steps") from None
                self._skip(trainer)
                return bad.loss
            self._num_in_row = 0
            if 0 < self._norm < math.inf:  # a norm of 0 (possible with a hinge loss) would distort the median
                self._norms.append(self._norm)
            return found

        if "step" in vars(optimizer):  # a learning-rate scheduler has replaced the method
            self.cleanup.callback(setattr, optimizer, "step", step)
        else:
            self.cleanup.callback(vars(optimizer).pop, "step", None)
        # A scheduler that is created during the run (SWA) wraps `step`, which must be a method for that.
        optimizer.step = types.MethodType(gated, optimizer)
        self._gated = optimizer

    def _skip(self, trainer: pl.Trainer) -> None:
        """Restore the state from before the batches of this step, and log these batches."""
        attributes = vars(trainer.lightning_module)
        # Lightning keeps the name of the running hook here, for `self.log`. Do not restore an earlier name.
        hook = attributes.get("_current_fx_name")
        self._snapshot.restore()
        attributes["_current_fx_name"] = hook
        self._is_skipped = True
        self._num_in_row += 1
        # Record the indices of the batches, so that the user can inspect these batches.
        last = trainer.fit_loop.epoch_loop.batch_idx
        # The norm is a string, because JSON has no NaN.
        row = {"epoch": trainer.current_epoch, "batches": [self._first_batch, last], "norm": str(self._norm)}
        self._skipped.append(row)
        text = f"callbacks/skip_bad_steps: gradient norm {self._norm:.4g}; skipped {_batches(row)}"
        rank_zero_info(text)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Stop only here, after the batch is complete, so that the checkpoint is at a step boundary.
        if not self._is_skipped or self._num_in_row != self.max_in_a_row:
            return
        saver = trainer.checkpoint_callback
        folder = str(getattr(saver, "dirpath", None) or trainer.default_root_dir)  # or a URL
        path = f"{folder.rstrip('/')}/before_bad_steps-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        save_nothing_on_exception(trainer)
        batches = "; ".join(map(_batches, self._skipped[-MAX_SHOWN:]))
        never = Remedy("callbacks.skip_bad_steps.max_in_a_row=null", "SkipBadSteps(max_in_a_row=None)")
        raise GradientError(
            f"{self._num_in_row} steps in a row were skipped, the last with a gradient norm of "
            f"{self._norm:.4g}: {batches}; {path} has the weights before them\n"
            f"  try: ckpt_path={path} and a smaller optimizer.lr\n  try: {never}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend(float(norm) for norm in state_dict["norms"])

    def outcome(self) -> Outcome:
        """Report which batches were skipped."""
        count, steps = len(self._skipped), self._num_steps
        did = f"skipped {count} of {steps} step{'s' * (steps != 1)}"
        shown = [_batches(row) for row in self._skipped[:MAX_SHOWN]]
        shown += ["..."] * (count > MAX_SHOWN)
        return Outcome(
            did=": ".join([did, *filter(None, ["; ".join(shown)])]),
            effective=steps > 0,
            numbers={"steps": steps, "skipped": self._skipped},
        )


class _BadStep(Exception):  # noqa: N818
    """Ends an optimizer's `step` after the closure, before the optimizer updates anything."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _batches(row: dict[str, Any]) -> str:
    first, last = row["batches"]
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    return f"{numbers} of epoch {row['epoch']}"


def _optimizer_error(optimizer: Optimizer, allowed: str) -> ConfigError:
    return ConfigError(
        key="optimizer",
        value=type(optimizer).__name__,
        allowed=f"with SkipBadSteps {allowed}",
        remedies=[_OFF],
    )
