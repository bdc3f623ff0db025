"""A script's own training to advise on: candidates are what would be added to its Trainer.

The Trainer is built again for one CPU with what determines memory: precision, accumulation, clipping, and
the techniques of this package. The script's other callbacks are left out, since they may do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core import rules
from lightning_eff.core.technique import Technique, constructor_arguments
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.planner.advice import TRIED_MICRO_BATCHES, Options, Size
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.prediction import predict
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.live_bytes import state_bytes
from lightning_eff.report.meter import samples_and_tokens

CANDIDATES: dict[str, Callable[[], Any]] = {
    "GradientCheckpointing()": GradientCheckpointing,
    'GradientCheckpointing(policy="selective")': partial(GradientCheckpointing, policy="selective"),
    'AutoPrecision(precision="bf16-mixed")': partial(AutoPrecision, precision="bf16-mixed"),
    'AutoPrecision(precision="bf16-true")': partial(AutoPrecision, precision="bf16-true"),
    "OptimizerChoice(optimizer=partial(InBackward, lr=...))": partial(
        OptimizerChoice, optimizer=partial(InBackward, lr=1e-3)
    ),
}
"""Candidates on every device as they are written: callbacks, and plugins for precision."""
HOST_CANDIDATES: dict[str, Callable[[], Any]] = {
    'GradientCheckpointing(policy="offload")': partial(GradientCheckpointing, policy="offload"),
    "OptimizerChoice(optimizer=partial(CpuOffload, lr=...))": partial(
        OptimizerChoice, optimizer=partial(CpuOffload, lr=1e-3)
    ),
}
"""Further candidates on a GPU."""


@dataclass(frozen=True)
class AdvisedScript:
    """A training that runs, or has ended.

    Args:
        module: The module as passed to `fit`; predictions use copies.
        batch: One of its batches, with or without memory.
        trainer: Its Trainer.
    """

    module: pl.LightningModule
    batch: Any
    trainer: pl.Trainer

    @property
    def memory(self) -> DeviceMemory:
        """Memory of the training's device."""
        # What the training has allocated now is counted again by a prediction.
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [each.grad for each in self.module.parameters() if each.grad is not None]
        held_bytes = sum(each.nbytes for each in tensors)
        held_bytes += sum(sum(state_bytes(optimizer).values()) for optimizer in self.trainer.optimizers)
        return DeviceMemory.of("", self.trainer.strategy.root_device, held_bytes=held_bytes)

    @property
    def candidates(self) -> Sequence[Options]:
        """Techniques to try."""
        return [(name,) for name in self._factories()]

    def _factories(self) -> dict[str, Callable[[], Any]]:
        size = max(1, samples_and_tokens(self.batch)[0] // TRIED_MICRO_BATCHES)
        micro_batch = {f"MicroBatch(micro_batch_size={size})": partial(MicroBatch, micro_batch_size=size)}
        return {**CANDIDATES, **micro_batch, **(HOST_CANDIDATES if self.memory.is_cuda else {})}

    def forecast(self, options: Options) -> MemoryForecast:
        """Predict the step with further techniques; raise the errors that the Trainer would raise."""
        factories = self._factories()
        added = [factories[option]() for option in options]
        check = self._rebuilt_trainer(added)
        rules.raise_rejected(rules.check_rules(rules.trainer_components(check), rules.run_facts(check)))
        num_batches = self.trainer.num_training_batches
        batch_size = getattr(self.trainer.train_dataloader, "batch_size", None)
        found = predict(
            self.module,
            self.batch,
            trainer=partial(self._rebuilt_trainer, added),
            num_batches=int(num_batches) if num_batches != float("inf") else None,
            batch_size=batch_size if isinstance(batch_size, int) else None,
        )
        return MemoryForecast(found, self.memory)

    def sizes(self) -> Sequence[Size]:
        """Return nothing: it is unknown how a script makes its batches."""
        return ()

    def _rebuilt_trainer(self, added: Sequence[Any]) -> pl.Trainer:
        """Build the Trainer again, for a CPU, with further callbacks and precision plugins."""
        trainer: Any = self.trainer
        # Keep this package's techniques that do more than observe; added ones replace those of their class.
        folders = ("lightning_eff.callbacks.", "lightning_eff.precision.")
        new_types = {type(technique) for technique in added}
        techniques: list[Any] = []
        for own in (trainer.precision_plugin, *trainer.callbacks):
            is_kept = isinstance(own, Technique) and type(own).__module__.startswith(folders)
            is_replaced = isinstance(own, Precision) and any(isinstance(new, Precision) for new in added)
            if is_kept and not is_replaced and type(own) not in new_types:
                techniques.append(type(own)(**constructor_arguments(own)))
        techniques += added
        plugins: list[Any] = [technique for technique in techniques if isinstance(technique, Precision)]
        precision: dict[str, Any] = {} if plugins else {"precision": trainer.precision}
        return pl.Trainer(
            **precision,
            accelerator="cpu",
            devices=1,
            max_steps=max(8, 4 * trainer.accumulate_grad_batches),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            callbacks=[technique for technique in techniques if not isinstance(technique, Precision)],
            plugins=plugins,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
