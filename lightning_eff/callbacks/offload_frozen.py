"""Keep the frozen weights of repeated blocks in host memory, and fetch them one block ahead.

With adapters, what takes most memory is weights that never change. Here those of each block are on the device
only while it computes: when a block begins, the next one's weights are copied to it, in the backward pass in
the opposite order, and what is done with is dropped. Two blocks are on the device at most. Autograd does not
hold them for the backward pass: where it saves a frozen weight, or a view of it, it is fetched once more.
Parameters, names, checkpoints and results are the same to the bit, and outside of its turn a parameter is its
values in host memory.

Trained parameters, buffers and everything outside of the blocks (embeddings, the head) are on the device as
before, and so are weights that are shared by two blocks or with the rest of the model, and quantized ones.
For CUDA the host memory is pinned, and copies run on a stream of their own: that their waits are right is
tested with a mock of CUDA's streams, but it has not run on a GPU yet. On a CPU they are plain copies, which
save nothing.

Saves: the frozen weights of all blocks but two.
Costs: each step copies the frozen weights of the blocks to the device twice, all but the last block's. It is
    hidden while a block computes for longer than the next one's copy takes. Pinned memory of the size of
    these weights for each process; torch rounds each tensor up to a power of two.
When not: the base fits; small batches, whose blocks compute for less time than a copy takes; on a CPU.
Conflicts: strategies that shard or move parameters; quantized weights; `callbacks/torch_compile` of more
    than blocks, and with CUDA graphs; callbacks that unfreeze. Autocast keeps casts of float32 weights for
    the backward pass: freeze in 16 bits (`precision=frozen_bf16`), or recompute. What a forward pass writes
    through `parameter.data` is lost, but for PEFT's merging; synchronize CUDA before writes between steps.
Source: https://arxiv.org/abs/2104.07857 (ZeRO-Infinity prefetches parameters from the host in this way)
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from typing_extensions import override

from lightning_eff.callbacks._offload_frozen.offloaded_weights import OffloadedWeights
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import (
    OFFLOADED_WEIGHTS,
    PLACES_STATE,
    QUANTIZED_WEIGHTS,
    TRANSFORM,
    Facts,
    Outcome,
    Rule,
    name_of,
)
from lightning_eff.core.text import human_bytes

OFF = "~callbacks.offload_frozen"


def offload_frozen(model: nn.Module, *, blocks: BlockSelector = None) -> OffloadedWeights:
    """Keep frozen weights of blocks in host memory from now on; for Fabric, or your own training loop.

    Args:
        model: With adapters, and with weights in their final dtype; before it is moved to a device, which the
            offloaded weights then do not follow, and before DDP wraps it. Blocks that are offloaded already
            are left as they are.
        blocks: Which blocks; None finds the repeated ones.

    Returns:
        What was offloaded; its `remove()` undoes it.

    Example:
        >>> import torch
        >>> layer = lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
        >>> model = nn.Sequential(layer(), layer())
        >>> offloaded = offload_frozen(model)
        >>> _ = model(torch.ones(1, 4))
        >>> list(offloaded.blocks), offloaded.num_bytes, offloaded.moved_bytes
        (['0', '1'], 160, 160)
        >>> offloaded.remove()
    """
    return OffloadedWeights(model, model_surgery.select_blocks(model, blocks))


class OffloadFrozen(Managed):
    """Keep the frozen weights of repeated blocks in host memory, and fetch them one block ahead.

    Args:
        blocks: Class names or patterns of module names (`net.layers.*`), classes, or a predicate of name and
            module; None finds the repeated blocks.

    Raises:
        ConfigError: `blocks` selects nothing.
        ConflictError: The strategy, quantized weights or a compiler needs the weights on the device.
        RuntimeError: An offloaded parameter is trained during the run.

    Warns:
        NoEffectWarning: No block has a frozen parameter, or the run is on a CPU.

    Example:
        >>> from lightning_eff import PeftAdapter
        >>> callbacks = [PeftAdapter(), OffloadFrozen()]
        >>> trainer = pl.Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
        >>> OffloadFrozen(blocks=3)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: blocks=3: expected ...
    """

    @check_arguments
    def __init__(self, *, blocks: BlockSelector = None) -> None:
        self.blocks = blocks
        self._trainer: pl.Trainer | None = None
        self._offloaded: OffloadedWeights | None = None
        self._begin = (0, 0)
        """Optimizer steps and moved bytes when training began."""
        self._validated = 0
        """Bytes moved for validation."""

    def facts(self) -> Facts:
        """Return what needs the frozen weights on the device, or in one place."""
        reason = "it shards or moves the parameters itself"
        placed = [replace(rule, reason=reason, remedies=("strategy=ddp", OFF)) for rule in PLACES_STATE]
        quantized = Rule(
            name=QUANTIZED_WEIGHTS,
            reason="their kernels keep them for the backward pass, and their scales on the device",
            remedies=("precision=frozen_bf16", OFF),
        )
        unfrozen = Rule(
            name="lightning/BaseFinetuning",
            reason="it unfreezes weights that are in host memory",
            remedies=("remove it", OFF),
        )
        late = replace(quantized, name="lightning/BitsandbytesPrecision")
        return Facts(provides=(TRANSFORM, OFFLOADED_WEIGHTS), excludes=(*placed, quantized, late, unfrozen))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer, self._offloaded = trainer, None
        self._begin, self._validated = (0, 0), 0
        self.cleanup.callback(model_surgery.restore, pl_module)
        model_surgery.queue(trainer, pl_module, Stage.OFFLOAD, self._apply)

    def _apply(self, model: nn.Module) -> int:
        try:
            new = offload_frozen(model, blocks=self.blocks)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        if new.blocks:
            self._offloaded = new
            self.cleanup.callback(new.remove)
        elif self._offloaded is None:
            self._offloaded = new
            text = f"OffloadFrozen had no effect: {self.outcome().did}"
            if self._trainer is None or self._trainer.training:
                warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new.blocks)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._offloaded is not None and isinstance(trainer.strategy, DDPStrategy):
            self._offloaded.broadcast(trainer.strategy.root_device)  # as DDP does with all others

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin, self._validated = (trainer.global_step, self._moved_bytes), 0

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated -= self._moved_bytes

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated += self._moved_bytes

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if self._offloaded is not None and self._offloaded.blocks and not outcome.effective:
            warnings.warn(f"OffloadFrozen had no effect: {outcome.did}", NoEffectWarning, stacklevel=2)

    @property
    def _moved_bytes(self) -> int:
        return 0 if self._offloaded is None else self._offloaded.moved_bytes

    def outcome(self) -> Outcome:
        """Return the blocks, the bytes on the host, those copied a step, and the most on the device."""
        offloaded = self._offloaded
        if offloaded is None or not offloaded.blocks:
            did = "no block has a frozen parameter" if offloaded is None else offloaded.reason
            return Outcome(did=did, effective=False)
        first_step, before = self._begin
        num_steps = 0 if self._trainer is None else self._trainer.global_step - first_step
        per_step = (self._moved_bytes - self._validated - before) // max(1, num_steps)
        count = len(offloaded.blocks)
        did = f"frozen weights of {count} block{'s' * (count != 1)} in host memory"
        did += f", {human_bytes(offloaded.num_bytes)}; {human_bytes(per_step)} a step copied to the device"
        did += f", at most {human_bytes(offloaded.peak_bytes)} there at once"
        did += "".join(f"; {human_bytes(size)} stay there: {why}" for why, size in offloaded.left.items())
        is_on_cpu = offloaded.device.type == "cpu"
        did += "; on a CPU this saves nothing" if is_on_cpu else ""
        numbers = {
            "blocks": list(offloaded.blocks), "host_bytes": offloaded.num_bytes,
            "moved_bytes_per_step": per_step, "peak_bytes": offloaded.peak_bytes,
            "left_bytes": dict(offloaded.left),
        }  # fmt: skip
        return Outcome(did=did, effective=self._moved_bytes > 0 and not is_on_cpu, numbers=numbers)
