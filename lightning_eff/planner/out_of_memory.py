"""One message for a run that is out of memory: the phase, what holds the memory, and an override that fits.

The run's own tensors are freed first. Then its step is predicted once more on fake tensors, and with
overrides that save memory, those first that leave the training as it is: smaller micro-batches, the
techniques of `plan --advice`, at last a smaller batch or shorter rows. Training steps are all that is
predicted: for validation and checkpoints there is no override.
"""

from __future__ import annotations

import gc
import io
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

from lightning_eff.core.errors import REFUSALS, RunOutOfMemoryError, root_cause_line
from lightning_eff.core.host_memory import Limit
from lightning_eff.core.text import human_bytes
from lightning_eff.planner.advice import Words, advise
from lightning_eff.planner.prediction import quietly
from lightning_eff.planner.advised_recipe import Compose, AdvisedRecipe
from lightning_eff.planner.device_memory import MemoryForecast, DeviceMemory
from lightning_eff.report.meter import samples_and_tokens
from lightning_eff.report.peak import Peak
from lightning_eff.report.recording import BUFFERS, PARAMETERS, STATE
from lightning_eff.report.module_tracker import BACKWARD, FORWARD, STEP
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
"""What a run is doing while one of these functions runs, the innermost of them."""
PREDICTED = {
    "the forward pass": FORWARD,
    "the backward pass": BACKWARD,
    "the optimizer step": STEP,
}
USABLE = 0.9
"""Fraction of the memory that an override may take: some workspaces of operations are in no prediction."""
LEAST_CHANGE = 0.97
"""Half a micro-batch that leaves more than this is not what the memory is needed for."""
BUDGET_S = 60.0
"""Seconds after which no further override is tried."""


def explain_out_of_memory(error: BaseException, compose: Compose, limit: Limit) -> RunOutOfMemoryError:
    """Free what a failed run holds, and return the error that is shown in its place.

    Args:
        error: The allocator's; its traceback is emptied.
        compose: Composes the run's recipe with more overrides.
        limit: Of the host's memory before the run: an allocator keeps addresses of what is freed.
    """
    phase = phase_of(error)
    asked = re.search(r"tried to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    first = f"out of memory during {phase}"
    if asked:
        first += (
            f": tried to allocate {_bytes(asked[1]) if asked[2] == 'bytes' else ' '.join(asked.groups())}"
        )
    free(error)
    try:
        with quietly(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            lines = _lines(phase, compose, limit)
    except Exception as failed:  # noqa: BLE001 - whatever fails now, the run's own error must be shown
        lines = [f"no advice: {root_cause_line(failed).removeprefix('error: ')}"]
    return RunOutOfMemoryError("\n  ".join([first, *lines]))


def phase_of(error: BaseException) -> str:
    """Return what the run was doing, by the functions in a traceback.

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
    """Free what the frames of an error's traceback hold: a step's tensors, and the run."""
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _lines(phase: str, compose: Compose, limit: Limit) -> list[str]:
    trainer = build_trainer(compose(()))
    if trainer.world_size > 1:
        return ["no advice: it is for one device, and this run has several"]
    recipe = AdvisedRecipe.of(compose, DeviceMemory.of("", trainer.strategy.root_device, limit=limit))
    if recipe is None:
        return ["no advice: the data gives no batch"]
    now = recipe.expect(())
    if now.peak is None or now.num_bytes is None:
        sizes = now.prediction.lasting_bytes
        return [f"held at least: {_largest(sizes)}", f"no advice: {now.prediction.reason}"]
    held = _held(now.peak, phase, recipe.room)
    if phase not in PREDICTED and phase != SETUP:
        return [held, "no advice: training steps are all that is predicted"]
    usable = int(USABLE * min(now.num_bytes, recipe.room.free_bytes))
    found = _override(recipe, now.num_bytes, usable)
    if found is None:
        return [held, "no override was found with which a step fits"]
    words, peak_bytes = found
    return [
        held,
        f"try: {' '.join(words)}",
        f"predicted with it: a peak of {human_bytes(peak_bytes)}, it fits",
    ]


def _held(peak: Peak, phase: str, room: DeviceMemory) -> str:
    """Say what a phase holds at its fullest; where it is not predicted, what lasts from step to step."""
    step_phase = PREDICTED.get(phase)
    lasting = {name: peak.by_category[name] for name in (PARAMETERS, BUFFERS, STATE)}
    sizes = lasting if step_phase is None else peak.by_phase[step_phase]
    needed, free_bytes = human_bytes(sum(sizes.values())), human_bytes(room.free_bytes)
    text = f"it needs {needed}, and {free_bytes} is free on {room.name}"
    text += f": {_largest(sizes)}"
    if step_phase == peak.phase and peak.holders:
        most = peak.holders[0]
        made = " in ".join(word for word in (most.operation, most.path) if word)
        text += f"; largest: {human_bytes(most.num_bytes)} of {most.category} ({made})"
    return text


def _largest(sizes: dict[str, int]) -> str:
    """Return the three largest categories in words."""
    most = sorted(sizes.items(), key=lambda each: -each[1])[:3]
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in most if size) or "nothing"


def _override(recipe: AdvisedRecipe, now_bytes: int, limit: int) -> tuple[Words, int] | None:
    """Return words with which the predicted peak is within a limit, and the peak."""
    until = time.monotonic() + BUDGET_S
    for words in _micro_batches(recipe):
        then = _tried(recipe, words) if time.monotonic() < until else None
        if then is None or then.num_bytes is None:
            break
        if then.num_bytes <= limit:
            return words, then.num_bytes
        if then.num_bytes > LEAST_CHANGE * now_bytes:
            break
        now_bytes = then.num_bytes
    spare = recipe.room.free_bytes - limit
    tight = replace(recipe, room=replace(recipe.room, memory_bytes=recipe.room.memory_bytes - spare))
    found = advise(tight, budget_s=until - time.monotonic())
    options = [tuple(word for each in found.chosen for word in each.words)]
    options += [(f"{each.typed}={each.value}",) for each in found.largest]
    for words in filter(None, options):
        then = _tried(recipe, words)
        if then is not None and then.num_bytes is not None and then.num_bytes <= limit:
            return words, then.num_bytes
    return None


def _tried(recipe: AdvisedRecipe, words: Words) -> MemoryForecast | None:
    """Predict the step with an override; None where it cannot be on."""
    try:
        return recipe.expect(words)
    except REFUSALS:
        return None


def _micro_batches(recipe: AdvisedRecipe) -> Iterator[Words]:
    """Yield overrides that cut a batch ever smaller; none for `auto`, which has tried them all."""
    listed = (recipe.compose(()).get("callbacks") or {}).get("micro_batch")
    rows = recipe.fed.batch_size or samples_and_tokens(recipe.fed.batch)[0]
    size = rows if listed is None else listed["micro_batch_size"]
    while isinstance(size, int) and size > 1:
        size = min(size, rows) // 2
        added = () if listed is not None else ("+callbacks=micro_batch",)
        yield (*added, f"callbacks.micro_batch.micro_batch_size={size}")


def _bytes(number: str) -> str:
    return human_bytes(float(number))
