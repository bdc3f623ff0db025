"""Check that a loss is a mean over samples: only then do micro-batches and windows keep its gradient.

A few samples of a batch run as one batch and in pairs; the mean of the pairs' losses must be the loss of all.
It differs for losses that compare samples with each other (contrastive, redundancy, ranking), for sums, and
for means over tokens without a `loss_weight`. Modules are in evaluation mode, since dropout and batch
statistics would differ. Random numbers that the step itself draws leave the question open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core.errors import ConflictError, root_cause_line
from lightning_eff.core.shards import is_sharded
from lightning_eff.microbatching.merging import mean
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart
from lightning_eff.microbatching.window import weight_of

MAX_SAMPLES = 16
MAX_ROUNDING = 0.03
"""Relative difference of two losses that 16 and 8 bits explain."""
Run = Callable[[MicroBatchPart], Any]
"""Runs `training_step` on a batch, and returns its output."""


class _UndecidedError(Exception):
    """The losses do not show whether they are means; the text says why."""


def check_mean(
    batch: Any,
    run: Run,
    module: pl.LightningModule,
    size: MicroBatchSize,
    max_samples: int,
    device: torch.device,
) -> tuple[str, str]:
    """Compare the loss of up to `max_samples` samples with the mean over their parts, and leave no trace.

    Returns:
        How the losses differ, and why they do not show whether they are means; for a mean both are empty.
    """
    parameters = list(module.parameters())
    if is_fake(parameters[0]):
        return "", ""
    try:
        if any(isinstance(child, _BatchNorm) and child.running_mean is None for child in module.modules()):
            _stop("a batch norm has no running statistics")
        if max_samples < 2:
            _stop("the batch has a single sample, or its samples cannot be counted")
        few = size.split(batch, min(MAX_SAMPLES, max_samples))[0]
        parts = size.split(few.batch, 1 if few.num_samples in (2, 3) else 2)
        snapshot = StepSnapshot(module, device)
        snapshot.keep()
        # Uncompiled, and unseen by counters of operations.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _disable_current_modes():
            outputs = [_run_part(run, part, module, snapshot) for part in (few, *parts, few)]
        losses, weights, has_drawn = zip(*outputs, strict=True)
        full, *of_parts, again = map(float, losses)
        counts = [part.num_samples for part in parts] if None in weights else weights[1:-1]
        of_mean, scale = float(mean(of_parts, counts)), max(map(abs, map(float, losses)))
        if None in counts or not scale or not math.isfinite(full - of_mean):
            _stop("the loss of a few samples is 0 or not finite, or they cannot be counted")
        dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        # Rounding explains 1e-5 in float64, 3e-3 in float32. Most losses that compare samples differ by more.
        rounding = max(1e-5, 8.0 * max(torch.finfo(dtype).eps for dtype in {*dtypes, losses[0].dtype}) ** 0.5)
        if not str(module.trainer.precision).startswith(("32", "64")):
            rounding = MAX_ROUNDING
        if abs(full - of_mean) <= min(rounding, MAX_ROUNDING) * scale:
            return "", ""
        if full != again or any(has_drawn):
            _stop("training_step draws random numbers, or does not return the same loss twice")
    except ConflictError:
        raise
    except Exception as error:  # noqa: BLE001 - a step in evaluation mode may raise anything
        cause = str(error) if isinstance(error, _UndecidedError) else root_cause_line(error)
        return "", f"not checked that the loss is a mean over samples: {cause}"
    return f"{full:.4g} for a few samples, and {of_mean:.4g} on average in {len(parts)} parts of them", ""


def _stop(text: str) -> None:
    raise _UndecidedError(text)


def _run_part(
    run: Run, part: MicroBatchPart, module: pl.LightningModule, snapshot: StepSnapshot
) -> tuple[Tensor, float | None, bool]:
    """Return the loss of a part in evaluation mode, its weight, and whether random numbers were drawn."""
    parameters = list(module.parameters())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    # A step may move a momentum encoder; what is frozen below an adapter is too large to copy.
    is_copied = 2 * sum(each.nbytes for each in frozen) <= sum(each.nbytes for each in parameters)
    is_copied &= not any(map(is_sharded, frozen))
    copies = [(parameter, parameter.data, parameter.data.clone()) for parameter in frozen if is_copied]
    for child in module.modules():
        vars(child)["training"] = False  # by `eval()` adapters may merge weights
    vars(module)["log"] = vars(module)["log_dict"] = lambda *_, **__: None
    try:
        # The step may change its batch in place.
        output = run(MicroBatchPart(apply_to_collection(part.batch, Tensor, Tensor.clone), part.num_samples))
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or (snapshot.has_changed_frozen() and not is_copied):
            _stop("training_step returned no loss, or changes frozen parameters")
        return loss, weight_of(output), snapshot.has_drawn()
    finally:
        with suppress(RuntimeError):  # frozen parameters have changed
            snapshot.restore()
        for parameter, data, values in copies:
            parameter.data = data.copy_(values)
