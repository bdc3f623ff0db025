"""Keep images and the weights of convolutions in channels-last memory format.

PyTorch stores images [B, C, H, W] channel by channel. Tensor cores compute convolutions pixel by pixel, with
the channels of a pixel adjacent: for other images the library transposes inputs and outputs in every call.
Here each batch is converted once, when it is on its device, and weights are converted before training; a
convolution passes the format on to the next layer. Shapes, values, parameters and names stay the same, only
strides change. The report names the first layer that breaks the format, which costs two transpositions.

Converted are the weights of convolutions in two and three dimensions, and tensors of a batch that one of
these layers could take, by number of axes and channels. Weights are converted after they are sharded, since
FSDP2 shards contiguous ones only. Its weights, and those under DeepSpeed, which sends them as bytes, stay as
they are and are converted in each call. Checkpoints have contiguous tensors, as without this technique. When
a run resumes, the optimizer's state takes the strides of its parameters, and so do gradients that code of
yours assigned: fused optimizers on the CPU (torch 2.13) read all of them in the order of memory, and compute
wrong updates where they differ.

An object of a batch that moves itself to a device (`BatchEncoding`) is left as it is. torch's LBFGS and its
`parameters_to_vector` take views of contiguous weights only.

Meant for GPUs with tensor cores, in float16, bfloat16 or TF32; not measured on one yet. On CPUs it depends
on the library's kernels: a step took 0.98 to 1.06 times as long on an AMD EPYC, and 0.58 times on an Intel
Xeon (float32, docs/benchmarks/compare.md).

Saves: transpositions around each convolution on a GPU with tensor cores.
Costs: a copy of each batch. Hooks of the layers in the first batch, none later. Code that calls `view` on
    images or weights may have to call `reshape`.
When not: on a GPU in float32 without TF32; models whose layers break the format (the report names the
    first); where `compare` shows no gain.
Conflicts: bitsandbytes' optimizers, which make weights contiguous and keep state in the order of memory;
    `torch.optim.LBFGS`.
Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.callbacks._channels_last.formats import (
    FormatProbe,
    convolutions,
    is_channels_last,
    is_image,
    to_format,
)
from lightning_eff.callbacks._channels_last.gradients import match_in_step
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConflictError, NoEffectWarning
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.technique import Facts, Outcome, Rule


def to_channels_last(model: nn.Module) -> dict[str, Callable[[], None]]:
    """Convert the weights of convolutions, in place; for Fabric, or your own training loop.

    The first convolution then converts a contiguous image; a batch that is converted once is faster:
    `images.to(memory_format=torch.channels_last)`. An optimizer whose state is loaded: `match_strides`.

    Args:
        model: Before its optimizer is built. Weights that are converted already, sharded or lazy are left.

    Returns:
        By name of the layer, a function that undoes it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> list(to_channels_last(model))
        ['0', '2']
        >>> model(torch.ones(1, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
        True
    """
    undo: dict[str, Callable[[], None]] = {}
    for name, layer in convolutions(model).items():
        weight: Any = dict(layer.named_parameters(recurse=False)).get("weight")
        if not is_lazy(weight) and is_image(weight) and not is_channels_last(weight):
            _arrange(weight, to_format)
            undo[name] = functools.partial(_arrange, weight, Tensor.contiguous)
    return undo


def _arrange(weight: Tensor, arranged: Callable[[Tensor], Tensor]) -> None:
    weight.data = arranged(weight.data)
    if weight.grad is not None:
        weight.grad = arranged(weight.grad)


def match_strides(optimizer: Optimizer) -> int:
    """Give an optimizer's state the strides of its parameters; return the number of changed tensors.

    Example:
        >>> layer = nn.Conv2d(8, 8, 3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9, fused=True)
        >>> layer(torch.ones(1, 8, 3, 3)).sum().backward()
        >>> optimizer.step()
        >>> _ = to_channels_last(layer)
        >>> match_strides(optimizer)
        1
    """
    num_changed = 0
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_alike = is_image(value) and is_image(parameter) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
                num_changed += 1
    return num_changed


@runtime_checkable
class Movable(Protocol):
    """What Lightning moves to the device of a run as a whole."""

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Return it on a device."""
        ...


class ChannelsLast(Managed):
    """Keep images and the weights of convolutions in channels-last memory format.

    Raises:
        ConflictError: The optimizer is one of bitsandbytes, or `torch.optim.LBFGS`.

    Warns:
        NoEffectWarning: The model has no convolutions in two or three dimensions, or none ran in the format.

    Example:
        >>> trainer = pl.Trainer(callbacks=[ChannelsLast()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_layers = self._num_weights = self._num_batches = self._num_converted = 0
        self._is_deepspeed = False
        self._takes: set[tuple[int, int]] = set()  # axes and channels of what convolutions take
        self._probe: FormatProbe | None = None

    def facts(self) -> Facts:
        """State whose optimizers read weights in the order of memory."""
        reason = "its kernels read a weight in the order of memory, and undo the format"
        remedies = ("optimizer=adamw_8bit", "~callbacks.channels_last")
        return Facts(excludes=(Rule(name="bitsandbytes/Optimizer8bit", reason=reason, remedies=remedies),))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._reset()
        self._is_deepspeed = isinstance(trainer.strategy, DeepSpeedStrategy)
        model_surgery.queue(trainer, pl_module, Stage.MEMORY_FORMAT, self._apply)
        # A hook of the module or the data module for this would hide one that the user has.
        strategy: Any = trainer.strategy
        to_device = strategy.batch_to_device

        def batch_to_device(*arguments: Any, **keywords: Any) -> Any:
            batch = self._convert(to_device(*arguments, **keywords))
            self._observe(trainer, pl_module)
            return batch

        strategy.batch_to_device = batch_to_device
        self.cleanup.callback(vars(strategy).pop, "batch_to_device", None)
        self.cleanup.callback(model_surgery.restore, pl_module)
        # After the weights: an optimizer may live on after the run.
        self.cleanup.callback(lambda: [match_strides(each) for each in trainer.optimizers])

    def _apply(self, model: nn.Module) -> int:
        layers: dict[str, Any] = convolutions(model)
        undo = {} if self._is_deepspeed else to_channels_last(model)
        for each in undo.values():
            self.cleanup.callback(each)
        self._num_weights += len(undo)
        self._num_layers = len(layers)
        self._takes = {(len(layer.kernel_size) + 2, layer.in_channels) for layer in layers.values()}
        if not layers:
            warnings.warn(f"ChannelsLast had no effect: {self.outcome().did}", NoEffectWarning, stacklevel=2)
        return len(undo)

    def _convert(self, batch: Any) -> Any:
        """Return a batch whose images are channels-last; its containers are new, what is no image is not.

        An object with a `to` of its own is left whole, as Lightning leaves it: it may hold more than tensors.
        """
        if not self._takes:
            return batch
        num_converted = self._num_converted
        converted = apply_to_collection(batch, Movable, self._converted, allow_frozen=True)
        if self._num_converted == num_converted:
            return batch
        self._num_batches += 1
        return converted

    def _converted(self, value: Any) -> Any:
        is_taken = is_image(value) and (value.ndim, value.shape[1]) in self._takes
        if not is_taken or is_channels_last(value):
            return value
        self._num_converted += 1
        return to_format(value)

    def _observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Attach the probe with the first batch of a run, and remove it with the next one."""
        if self._probe is not None:
            self._probe.remove()
        elif self._takes and not trainer.sanity_checking:
            self._probe = FormatProbe(module)
            self.cleanup.callback(self._probe.remove)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                msg = (
                    "ChannelsLast cannot be combined with torch.optim.LBFGS, which flattens gradients by view"
                    "\n  try: optimizer=adamw\n  try: ~callbacks.channels_last"
                )
                raise ConflictError(msg)
            match_strides(optimizer)
            if not self._is_deepspeed:  # its optimizers have no such hook, and its weights are contiguous
                self.cleanup.callback(optimizer.register_step_pre_hook(match_in_step).remove)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        for name, value in checkpoint.get("state_dict", {}).items():
            checkpoint["state_dict"][name] = _stored(value)
        if "optimizer_states" in checkpoint:  # their inner dictionaries are the optimizer's own
            states = apply_to_collection(checkpoint["optimizer_states"], Tensor, _stored, allow_frozen=True)
            checkpoint["optimizer_states"] = states

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if self._num_layers and not outcome.effective:
            warnings.warn(f"ChannelsLast had no effect: {outcome.did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report how many convolutions ran in the format in the first step, and what broke it first."""
        probe, count = self._probe, self._num_layers
        each = {} if probe is None else probe.num_convolutions
        kept = {} if probe is None else probe.kept
        breaks = [] if probe is None else probe.breaks
        contiguous = [] if probe is None else sorted(probe.contiguous_weights)
        num_kept = sum(each[name] for name, is_kept in kept.items() if is_kept)
        num_tiled = 0 if probe is None else probe.num_tiled
        num_unseen = max(0, count - sum(each[name] for name in kept) - num_tiled)
        layers = f"{count} convolution{'s' * (count != 1)}"
        if not count:
            did = "the model has no convolutions in two or three dimensions"
        elif probe is None:
            did = f"{layers}, no batch yet"
        else:
            did = f"{num_kept} of {layers} ran with channels-last inputs and outputs"
            did += f", {num_tiled} computed in tiles" if num_tiled else ""
            did += f", {num_unseen} not called as modules" if num_unseen else ""
            did += f"; the format is first broken {breaks[0]}" if breaks else ""
            did += f"; {len(contiguous)} weights are contiguous: converted in each call" if contiguous else ""
            did += f"; {self._num_batches} batch{'es' * (self._num_batches != 1)} converted"
        numbers = {
            "convolutions": count, "channels_last": num_kept, "breaks": breaks, "weights": self._num_weights,
            "contiguous_weights": contiguous, "tiled": num_tiled,
            "batches": self._num_batches, "tensors": self._num_converted,
        }  # fmt: skip
        return Outcome(did=did, effective=num_kept + num_tiled > 0, numbers=numbers)


def _stored(value: Any) -> Any:
    """Return a tensor as checkpoints have it; only those that are channels-last are copied."""
    return value.contiguous() if is_image(value) and is_channels_last(value) else value
