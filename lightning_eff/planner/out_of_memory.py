"""Explain an OOM error in one message: the phase, the largest tensors, and an override that fits.

`train` calls `explain_out_of_memory` when a run fails. After the run's tensors are freed, the step is
predicted on fake tensors. Then the step is predicted with each override that `plan --advice` tries, in the
same order. Only training steps can be predicted, so an OOM error in validation or while saving a checkpoint
gets no advice.
"""

from __future__ import annotations

import gc
import io
import re
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from typing import Any

from lightning_eff.core.errors import RunOutOfMemoryError
from lightning_eff.core.host_memory import HostMemoryLimit
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels import devices
from lightning_eff.planner.advice import AdvisedRecipe, Compose, advise, candidates
from lightning_eff.planner.forecast import DeviceMemory
from lightning_eff.prediction.predict import quietly, reason_of
from lightning_eff.report.module_tracker import BACKWARD, FORWARD, STEP
from lightning_eff.report.peak import Holder
from lightning_eff.report.recording import BUFFERS, PARAMETERS, STATE
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
"""Functions of Lightning 2.6, each with a phase of a run. In a traceback, the innermost function decides."""
PREDICTED = {"the forward pass": FORWARD, "the backward pass": BACKWARD, "the optimizer step": STEP}
USABLE = 0.9
"""Fraction of the free memory that an advised step may need, since some workspaces are not predicted."""
EXPLAINED = 0.5
"""Fraction of the free memory. A step that is predicted to need less did not cause the error."""
BUDGET_S = 60.0
"""Seconds after which no further override is tried."""


def explain_out_of_memory(
    error: BaseException, compose: Compose, limit: HostMemoryLimit
) -> RunOutOfMemoryError:
    """Free the memory of a failed run, and return an error that explains the failure.

    Args:
        error: The allocator's error; its traceback is cleared.
        compose: Composes the run's recipe with further overrides.
        limit: Limit of host memory, read before the run. A later reading would count freed memory as used,
            because allocators keep freed memory.
    """
    phase = phase_of(error)
    first = f"out of memory during {phase}"
    request = re.search(r"tried to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    if request:
        number, unit = request.groups()
        size = human_bytes(float(number)) if unit == "bytes" else f"{number} {unit}"
        first += f": tried to allocate {size}"
    # The advice below needs memory for its own predictions.
    free(error)
    found: dict[str, Any] = {
        "phase": phase,
        "overrides": [],
        "holders": [],
        "num_bytes": None,
        "peak_bytes": None,
    }
    try:
        # The recipe is built again, so its output would be shown twice.
        with quietly(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            lines = _lines(phase, compose, limit, found)
    except Exception as failed:  # noqa: BLE001 - whatever fails now, the run's own error must be shown
        lines = [f"no advice: {reason_of(failed)}"]
    shown = lines[:1] if found["overrides"] else lines  # the page shows overrides in their own field
    found["sentences"] = [f"{line[0].upper()}{line[1:]}" for line in (first, *shown)]
    return RunOutOfMemoryError("\n  ".join([first, *lines]), found)


def phase_of(error: BaseException) -> str:
    """Return the phase in which an error was raised, by the functions in its traceback."""
    # A traceback starts at the outermost frame. The innermost frame decides, so the search is reversed.
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((PHASES[name] for name in reversed(names) if name in PHASES), SETUP)


def free(error: BaseException | None) -> None:
    """Free the local variables in an error's traceback: the tensors of a step, and the run itself."""
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        # The frames of an error's cause keep the run alive, too.
        error = error.__cause__ or error.__context__
    gc.collect()


def _lines(phase: str, compose: Compose, limit: HostMemoryLimit, found: dict[str, Any]) -> list[str]:
    """Return the message's lines on the largest tensors and the advice; add their values to `found`."""
    values = compose(())
    trainer = build_trainer(values)
    if trainer.world_size > 1:
        return ["no advice: it is for a single device, and this run has several"]
    device = devices.of(trainer.strategy.root_device)
    recipe = AdvisedRecipe.of(compose, values, DeviceMemory.of(device, limit=limit))
    now = recipe.forecast(())
    if now.peak is None or now.num_bytes is None:
        return [f"no advice: {now.prediction.reason}"]
    # Bytes at the peak of the phase. A phase that is not predicted needs at least the persistent tensors.
    step_phase = PREDICTED.get(phase)
    sizes = {name: now.peak.by_category[name] for name in (PARAMETERS, BUFFERS, STATE)}
    sizes = sizes if step_phase is None else now.peak.by_phase[step_phase]
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest if size)
    total, free_bytes = human_bytes(sum(sizes.values())), human_bytes(recipe.memory.free_bytes)
    needed = f"it needs {total}, and {free_bytes} is free on {recipe.memory.name}: {listed}"
    holders = [Holder(name, "", name, size, count=1) for name, size in largest if size]
    if step_phase == now.peak.phase and now.peak.holders:
        holders = now.peak.holders
        needed += f"; largest: {holders[0].name}, {human_bytes(holders[0].num_bytes)}"
    found["num_bytes"] = sum(sizes.values())
    found["holders"] = [asdict(each) for each in holders]
    if phase not in PREDICTED and phase != SETUP:
        return [needed, "no advice: only training steps can be predicted"]
    if now.num_bytes < EXPLAINED * recipe.memory.free_bytes:
        reason = "the first batch does not explain this: a later one is larger, or something else allocates"
        dividing = [each.words[0] for each in candidates() if each.divides]
        return [needed, reason, *(f"try: {word}" for word in dividing if not recipe.is_on(word))]
    # The step failed, so the advice must lower the predicted peak even if this peak fits.
    usable_bytes = int(USABLE * min(now.num_bytes, recipe.memory.free_bytes))
    advice = advise(recipe, usable_bytes=usable_bytes, budget_s=BUDGET_S, shows_alone=False)
    if not advice.overrides:
        return [needed, "no override was found with which a step fits"]
    found["peak_bytes"] = advice.peak_bytes
    found["overrides"] = list(advice.overrides)
    return [
        needed,
        f"try: {' '.join(advice.overrides)}",
        f"predicted peak with it: {human_bytes(advice.peak_bytes or 0)}, it fits",
    ]
