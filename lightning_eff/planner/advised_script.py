"""A script's own training as the subject of advice: techniques are what would be added to its Trainer.

The Trainer is made anew for one CPU with what decides over memory: precision, accumulation, clipping, and the
suite's techniques. The script's other callbacks are left out: they may do anything, and none of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core import rules
from lightning_eff.core.technique import Technique, arguments
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.planner.advice import Size, Words, default_micro_batch
from lightning_eff.planner.prediction import predict
from lightning_eff.planner.device_memory import MemoryForecast, DeviceMemory
from lightning_eff.precision.mixed import Mixed
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.report.meter import samples_and_tokens

CANDIDATES: dict[str, Callable[[], Any]] = {
    "GradientCheckpointing()": GradientCheckpointing,
    'GradientCheckpointing(policy="selective")': lambda: GradientCheckpointing(policy="selective"),
    'Mixed(precision="bf16-mixed")': lambda: Mixed(precision="bf16-mixed"),
    'Mixed(precision="bf16-true")': lambda: Mixed(precision="bf16-true"),
    "OptimizerChoice(optimizer=partial(InBackward, lr=...))": lambda: _chosen(InBackward),
}
"""What to try, as it is written; callbacks, and plugins for precision."""
WITH_HOST: dict[str, Callable[[], Any]] = {
    'GradientCheckpointing(policy="offload")': lambda: GradientCheckpointing(policy="offload"),
    "OptimizerChoice(optimizer=partial(CpuOffload, lr=...))": lambda: _chosen(CpuOffload),
}
"""The same for a device that has a host beside it."""


def _chosen(optimizer: Callable[..., Any]) -> OptimizerChoice:
    return OptimizerChoice(optimizer=functools.partial(optimizer, lr=1e-3))


@dataclass(frozen=True)
class AdvisedScript:
    """A training that goes on, or has ended.

    Args:
        module: As it would be given to `fit`; a copy is what is tried on.
        batch: One of its batches, with or without memory.
        trainer: What it is trained with.
    """

    module: pl.LightningModule
    batch: Any
    trainer: pl.Trainer

    @property
    def room(self) -> DeviceMemory:
        """The memory of the device that it is trained on."""
        return DeviceMemory.of("", self.trainer.strategy.root_device, held_bytes=self._held_bytes())

    def _held_bytes(self) -> int:
        """Return what the training has in memory now and a prediction counts once more."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [each.grad for each in self.module.parameters() if each.grad is not None]
        state = (sum(state_bytes(optimizer).values()) for optimizer in self.trainer.optimizers)
        return sum(each.nbytes for each in tensors) + sum(state)

    @property
    def candidates(self) -> Sequence[Words]:
        """Techniques to try."""
        return [(name,) for name in self._makers()]

    def _makers(self) -> dict[str, Callable[[], Any]]:
        """Return how each candidate is made, by how it is written."""
        rows = default_micro_batch(samples_and_tokens(self.batch)[0])
        parts = {f"MicroBatch(micro_batch_size={rows})": lambda: MicroBatch(micro_batch_size=rows)}
        return {**CANDIDATES, **parts, **(WITH_HOST if self.room.is_cuda else {})}

    def expect(self, words: Words) -> MemoryForecast:
        """Predict the step with some techniques more; raises what the Trainer would say to them."""
        makers = self._makers()
        made = [makers[each]() for each in words]
        check = self._again(made)
        rules.raise_refused(rules.check(rules.objects_of(check), rules.run_facts(check)))
        count = self.trainer.num_training_batches
        size = getattr(self.trainer.train_dataloader, "batch_size", None)
        found = predict(
            self.module,
            self.batch,
            trainer=lambda: self._again(made),
            num_batches=int(count) if count != float("inf") else None,
            batch_size=size if isinstance(size, int) else None,
        )
        return MemoryForecast(found, self.room)

    def instead(self, one: Words, other: Words) -> bool:
        """Say whether two candidates are of one class."""
        return one[0].partition("(")[0] == other[0].partition("(")[0]

    def changes_trainable_params(self, words: Words) -> bool:
        """Say that no candidate trains other weights."""
        del words
        return False

    def sizes(self) -> Sequence[Size]:
        """Return nothing: how a script makes its batches is not known."""
        return []

    def _again(self, more: Sequence[Any]) -> pl.Trainer:
        """Make the Trainer once more, for a CPU."""
        trainer: Any = self.trainer
        callbacks = [_anew(each) for each in trainer.callbacks if _is_ours(each)]
        plugins: list[Any] = [each for each in more if isinstance(each, Precision)]
        if not plugins and _is_ours(trainer.precision_plugin):
            plugins = [_anew(trainer.precision_plugin)]
        given: dict[str, Any] = {} if plugins else {"precision": trainer.precision}
        new = [each for each in more if not isinstance(each, Precision)]
        kept = [each for each in callbacks if type(each) not in {type(other) for other in new}]
        return pl.Trainer(
            **given,
            accelerator="cpu",
            devices=1,
            max_steps=max(8, 4 * trainer.accumulate_grad_batches),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            callbacks=[*kept, *new],
            plugins=plugins,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def _is_ours(each: object) -> bool:
    """Say whether something changes a run and is of the suite: what only watches has no say in memory."""
    kind = type(each).__module__
    return isinstance(each, Technique) and kind.startswith(
        ("lightning_eff.callbacks.", "lightning_eff.precision.")
    )


def _anew(technique: object) -> Any:
    return type(technique)(**arguments(technique))
