"""Keep images and the weights of convolutions in channels-last memory format.

PyTorch stores images [B, C, H, W] channel by channel. Tensor cores compute convolutions pixel by pixel, and
need the channels of a pixel to be adjacent. For other layouts, the convolution library transposes inputs and
outputs in every call. This callback converts the weights of 2D and 3D convolutions before training. In each
batch, the callback converts each image whose numbers of axes and channels match one of these convolutions.
Values, names and checkpoints stay the same; only strides change.

Weights stay contiguous if the strategy is FSDP2 or DeepSpeed, or if they share memory with another tensor.
The convolution library then converts these weights in each call.

Saves: transpositions around each convolution on a GPU with tensor cores.
Costs: a copy of each batch's images. Code that calls `view` on images or weights may need `reshape` instead,
    and `as_strided` on an image reads different pixels than before. Random numbers in the shape of an image
    (`randn_like`, dropout) are drawn in memory order, so the same seed gives different values than for a
    contiguous image.
When not: the run uses float32 without TF32 on a GPU; `compare` shows no gain.
Conflicts: bitsandbytes' optimizers and `torch.optim.LBFGS`, which need contiguous weights.
Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_eff.core import model_surgery
from lightning_eff.core.errors import TO_ADAMW, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Facts, Outcome, Rule, Try

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by number of axes: batch, channels, and two or three spatial axes."""
CONTIGUOUS = dict.fromkeys(FORMATS, torch.contiguous_format)
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


class ChannelsLast(Managed):
    """Keep images and the weights of convolutions in channels-last memory format.

    Raises:
        ConflictError: The optimizer is `torch.optim.LBFGS`, or an optimizer of bitsandbytes.

    Warns:
        NoEffectWarning: Neither a weight nor an image was converted.
    """

    exact = True
    lowers = ("time",)
    try_as = (Try(),)

    def __init__(self) -> None:
        self._accepted: set[tuple[int, int]] = set()  # (axes, channels) of images that convolutions accept
        self._weights: list[Tensor] = []  # the converted weights
        self._num_images = 0

    def facts(self) -> Facts:
        """Reject optimizers that read weights in memory order."""
        reason = "it needs contiguous weights"
        remedies = (TO_ADAMW, Remedy("~callbacks.channels_last", "remove ChannelsLast"))
        names = ("bitsandbytes/Optimizer8bit", "torch/LBFGS")
        return Facts(excludes=tuple(Rule(name=name, reason=reason, remedies=remedies) for name in names))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._weights, self._num_images = [], 0
        strategy: Any = trainer.strategy
        move = strategy.batch_to_device
        # Why not a batch hook of the module or data module: such a hook would hide the user's own hook.
        strategy.batch_to_device = lambda *args, **keywords: tree_map(self._convert, move(*args, **keywords))
        self.cleanup.callback(vars(strategy).pop, "batch_to_device", None)
        self.cleanup.callback(model_surgery.restore, pl_module)
        apply = functools.partial(self._apply, trainer)
        model_surgery.queue(trainer, pl_module, model_surgery.Stage.MEMORY_FORMAT, apply)
        self.cleanup.callback(self._arrange, trainer, CONTIGUOUS)

    def _apply(self, trainer: pl.Trainer, model: nn.Module) -> int:
        layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, CONVOLUTIONS)]
        # The axes of an image: samples, channels and as many spatial axes as the kernel has.
        self._accepted = {(len(layer.kernel_size) + 2, layer.in_channels) for layer in layers}
        # Why not `layer.weight`: in a parametrized layer, this read changes the state of spectral_norm.
        weights = [p for layer in layers for p in layer.parameters(recurse=False)]
        new = [w for w in weights if _is_image(w) and not w.is_contiguous(memory_format=FORMATS[w.ndim])]
        # A conversion copies a weight, so weights that share memory would no longer share it.
        tensors = (*model.parameters(), *model.buffers())
        memories = [tensor.untyped_storage() for tensor in tensors if _is_dense(tensor)]
        shared = Counter(map(id, memories))
        new = [w for w in new if shared[id(w.untyped_storage())] == 1]
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return 0  # the strategy sends weights as bytes, in memory order
        self._weights += new
        self._arrange(trainer, FORMATS)
        return len(new)

    def _arrange(self, trainer: pl.Trainer, formats: dict[int, torch.memory_format]) -> None:
        """Set the memory format of the converted weights, of their gradients and of their optimizer state."""
        for weight in self._weights:
            # Set `.data`, so that the parameter stays the same object for the optimizer and DDP.
            weight.data = _in_format(weight.data, formats)
            weight.grad = _in_format(weight.grad, formats)
            for state in (optimizer.state.get(weight, {}) for optimizer in trainer.optimizers):
                state.update({name: _in_format(value, formats) for name, value in state.items()})

    def _convert(self, value: Any) -> Any:
        if not _is_image(value) or (value.ndim, value.shape[1]) not in self._accepted:
            return value
        self._num_images += 1
        return _in_format(value, FORMATS)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers if self._weights else []:
            hook = optimizer.register_step_pre_hook(functools.partial(self._match_in_step, trainer))
            self.cleanup.callback(hook.remove)

    def _match_in_step(self, trainer: pl.Trainer, _: Any, args: Any, keywords: dict[str, Any]) -> Any:
        """Before the optimizer steps, restore memory formats that a checkpoint or an assignment changed."""
        closure = keywords.get("closure") or (lambda: None)

        def computed() -> Any:
            loss = closure()  # Lightning computes the gradients in this closure
            # Fused CPU optimizers read weights, gradients and state in memory order.
            self._arrange(trainer, FORMATS)
            return loss

        return args, keywords | {"closure": computed}

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        # Save contiguous tensors, so that a checkpoint does not depend on this technique.
        stored = functools.partial(_in_format, formats=CONTIGUOUS)
        weights = checkpoint.get("state_dict", {})
        weights.update(tree_map(stored, dict(weights)))
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = tree_map(stored, checkpoint["optimizer_states"])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.outcome().effective:
            warnings.warn("ChannelsLast had no effect: nothing to convert", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the numbers of converted weights and images."""
        numbers = {"weights": len(self._weights), "images": self._num_images}
        did = f"converted weights: {len(self._weights)}, images in batches: {self._num_images}"
        return Outcome(did=did, effective=any(numbers.values()), numbers=numbers)


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or is_lazy(value) or hasattr(type(value), "__tensor_flatten__"):
        return False
    return value.layout == torch.strided and not value.is_nested


def _is_image(value: Any) -> bool:
    """Return whether a value is a dense, unsharded float tensor of 4 or 5 axes, as images are."""
    return _is_dense(value) and value.is_floating_point() and value.ndim in FORMATS


def _in_format(value: Any, formats: dict[int, torch.memory_format]) -> Any:
    return value.contiguous(memory_format=formats[value.ndim]) if _is_image(value) else value
