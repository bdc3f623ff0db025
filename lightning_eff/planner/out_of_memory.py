"""Explain an out-of-memory error in one message: the phase, what holds the memory, and an override that fits.

The run's own tensors are freed first. Then its step is predicted on fake tensors, and predicted again with
overrides that save memory. Those that leave the training unchanged come first: smaller micro-batches, the
techniques of `plan --advice`, and last a smaller batch or shorter samples. Only training steps can be
predicted: for validation and checkpoints there is no advice.
"""

from __future__ import annotations

import gc
import io
import re
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

from lightning_eff.core.errors import PRE_RUN_ERRORS, RunOutOfMemoryError
from lightning_eff.core.host_memory import HostMemoryLimit
from lightning_eff.core.text import human_bytes
from lightning_eff.planner.advice import advise
from lightning_eff.planner.advised_recipe import AdvisedRecipe, Compose, Options
from lightning_eff.planner.device_memory import DeviceMemory
from lightning_eff.planner.prediction import quietly, reason_of
from lightning_eff.report.meter import samples_and_tokens
from lightning_eff.report.recording import BACKWARD, BUFFERS, FORWARD, PARAMETERS, STATE, STEP
from lightning_eff.run import build_trainer

SETUP = "setup"
PHASES = {
    "training_step": "the forward pass",
    "backward": "the backward pass",
    "optimizer_step": "the optimizer step",
    "validation_step": "validation",
    "batch_to_device": "the transfer of a batch",
    "save_checkpoint": "the save of a checkpoint",
    "restore_training_state": "the load of a checkpoint",
    "_restore_modules_and_callbacks": "the load of a checkpoint",
}
"""Phase of a run by the innermost of these functions in a traceback (Lightning 2.6)."""
PREDICTED = {"the forward pass": FORWARD, "the backward pass": BACKWARD, "the optimizer step": STEP}
USABLE = 0.9
"""Fraction of the free memory that an override may use: workspaces of some operations are not predicted."""
MAX_RATIO = 0.97
"""Stop halving the micro-batch if a half leaves more than this fraction of the peak."""
BUDGET_S = 60.0
"""Seconds after which no further override is tried."""


def explain_out_of_memory(
    error: BaseException, compose: Compose, limit: HostMemoryLimit
) -> RunOutOfMemoryError:
    """Free the memory of a failed run, and return the error to show instead.

    Args:
        error: The allocator's error; its traceback is cleared.
        compose: Composes the run's recipe with further overrides.
        limit: Limit of host memory before the run; afterwards allocators keep freed addresses.
    """
    phase = phase_of(error)
    first = f"out of memory during {phase}"
    request = re.search(r"tried to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    if request:
        number, unit = request.groups()
        size = human_bytes(float(number)) if unit == "bytes" else f"{number} {unit}"
        first += f": tried to allocate {size}"
    free(error)
    try:
        with quietly(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            lines = _lines(phase, compose, limit)
    except Exception as failed:  # noqa: BLE001 - whatever fails now, the run's own error must be shown
        lines = [f"no advice: {reason_of(failed)}"]
    return RunOutOfMemoryError("\n  ".join([first, *lines]))


def phase_of(error: BaseException) -> str:
    """Return the phase of a run in which an error was raised, by the functions in its traceback.

    Example:
        >>> def training_step():
        ...     raise MemoryError
        >>> try:
        ...     training_step()
        ... except MemoryError as error:
        ...     phase_of(error)
        'the forward pass'
    """
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((PHASES[name] for name in reversed(names) if name in PHASES), SETUP)


def free(error: BaseException | None) -> None:
    """Free the locals in the frames of an error's traceback: a step's tensors, and the run."""
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _lines(phase: str, compose: Compose, limit: HostMemoryLimit) -> list[str]:
    """Return the lines after the first: what holds the memory, and advice."""
    trainer = build_trainer(compose(()))
    if trainer.world_size > 1:
        return ["no advice: it is for a single device, and this run has several"]
    recipe = AdvisedRecipe.of(compose, DeviceMemory.of("", trainer.strategy.root_device, limit=limit))
    if recipe is None:
        return ["no advice: no batch could be loaded"]
    now = recipe.forecast(())
    if now.peak is None or now.num_bytes is None:
        sizes = now.prediction.persistent_bytes
        return [f"needs at least: {_largest(sizes)}", f"no advice: {now.prediction.reason}"]
    # What the phase needs; for a phase that is not predicted, what lasts from step to step.
    step_phase = PREDICTED.get(phase)
    sizes = {name: now.peak.by_category[name] for name in (PARAMETERS, BUFFERS, STATE)}
    sizes = sizes if step_phase is None else now.peak.by_phase[step_phase]
    total, free_bytes = human_bytes(sum(sizes.values())), human_bytes(recipe.memory.free_bytes)
    needed = f"it needs {total}, and {free_bytes} is free on {recipe.memory.name}: {_largest(sizes)}"
    if step_phase == now.peak.phase and now.peak.holders:
        holder = now.peak.holders[0]
        origin = " in ".join(name for name in (holder.operation, holder.path) if name)
        needed += f"; largest: {human_bytes(holder.num_bytes)} of {holder.category} ({origin})"
    if phase not in PREDICTED and phase != SETUP:
        return [needed, "no advice: only training steps can be predicted"]
    usable_bytes = int(USABLE * min(now.num_bytes, recipe.memory.free_bytes))
    found = _override_that_fits(recipe, now.num_bytes, usable_bytes)
    if found is None:
        return [needed, "no override was found with which a step fits"]
    options, peak_bytes = found
    peak = f"predicted peak with it: {human_bytes(peak_bytes)}, it fits"
    return [needed, f"try: {' '.join(options)}", peak]


def _largest(sizes: dict[str, int]) -> str:
    """Return the three largest categories."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in largest if size) or "nothing"


def _override_that_fits(
    recipe: AdvisedRecipe, now_bytes: int, usable_bytes: int
) -> tuple[Options, int] | None:
    """Return an override whose predicted peak fits, and the peak."""
    until = time.monotonic() + BUDGET_S
    # Halve the micro-batch; nothing to try for `auto`, which has tried them all.
    configured = (recipe.compose(()).get("callbacks") or {}).get("micro_batch")
    samples = recipe.example.batch_size or samples_and_tokens(recipe.example.batch)[0]
    size = samples if configured is None else configured["micro_batch_size"]
    added = () if configured is not None else ("+callbacks=micro_batch",)
    while isinstance(size, int) and size > 1:
        size = min(size, samples) // 2
        options = (*added, f"callbacks.micro_batch.micro_batch_size={size}")
        then = _peak_bytes(recipe, options) if time.monotonic() < until else None
        if then is None:
            break
        if then <= usable_bytes:
            return options, then
        if then > MAX_RATIO * now_bytes:
            break
        now_bytes = then
    # The search that `plan --advice` makes, in as much memory as may be used.
    spare = recipe.memory.free_bytes - usable_bytes
    memory = replace(recipe.memory, memory_bytes=recipe.memory.memory_bytes - spare)
    found = advise(replace(recipe, memory=memory), budget_s=until - time.monotonic())
    tried = [tuple(word for each in found.chosen for word in each.words)]
    tried += [(f"{each.typed}={each.value}",) for each in found.largest]
    for options in filter(None, tried):
        then = _peak_bytes(recipe, options)
        if then is not None and then <= usable_bytes:
            return options, then
    return None


def _peak_bytes(recipe: AdvisedRecipe, options: Options) -> int | None:
    """Predict the step with an override; return None if it conflicts or cannot be predicted."""
    try:
        return recipe.forecast(options).num_bytes
    except PRE_RUN_ERRORS:
        return None
