"""Linear layers by our tiled GEMM, and weight gradients added in place while a step is accumulated.

Every `nn.Linear` that is large enough gets another class: parameters, names and checkpoints stay what they
are. On a CUDA GPU each product then goes to the row of our kernels that was measured to be faster than
torch's library (`lightning-eff bench --tune`), to the library where none was. Wherever GradientAccumulation
or MicroBatch makes a step of several backward passes, the gradient of a weight is added by the product itself
to the one that is there, and no second gradient of its size is made.

Costs: nothing where torch's library computes; some microseconds of Python a layer where our kernels do.
Conflicts: `callbacks/torch_compile`: compiled blocks compute their layers by the compiler. Subclasses of
    `nn.Linear` are left as they are. Second derivatives (a gradient penalty) are refused when asked for.
Source: learned from Megatron-LM's fused weight gradients; kernels/matmul.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, model_surgery, rules
from lightning_eff.core.dtypes import dtype_of, product_dtype
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.model_surgery import Blocks, Stage
from lightning_eff.core.shards import shape_of
from lightning_eff.core.technique import TRANSFORM, Facts, Outcome, Rule, Verdict
from lightning_eff.kernels import dispatch
from lightning_eff.kernels import linear as layers
from lightning_eff.kernels.matmul import INTERPRETED
from lightning_eff.kernels.table import Shape
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.micro_batch_size import is_count
from lightning_eff.report import tile_explanation


def swap(
    model: nn.Module,
    *,
    min_features: int = 128,
    blocks: Blocks = None,
    backend: str = "auto",
    accumulation: layers.Accumulation | None = None,
) -> dict[str, layers.TritonLinear]:
    """Give linear layers of a model the class of ours; for Fabric, or a loop of one's own.

    Args:
        model: Any module; layers that are swapped already are left as they are.
        min_features: Layers with fewer input or output features stay.
        blocks: Parts of the model whose layers are meant; None means all.
        backend: As in `kernels.matmul.gemm`.
        accumulation: Lets weight gradients be added in place while it is open.

    Returns:
        What was swapped, by name; `unswap` takes it back.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
        >>> list(swap(model))
        ['0']
    """
    parts = {"": model} if blocks is None else model_surgery.select(model, blocks)
    swapped: dict[str, layers.TritonLinear] = {}
    for prefix, part in parts.items():
        for name, module in part.named_modules(prefix=prefix):
            if type(module) is nn.Linear and min(module.in_features, module.out_features) >= min_features:
                module.__class__ = layers.TritonLinear
                swapped[name] = _set(module, backend, accumulation)
    return swapped


def _set(module: nn.Module, backend: str, accumulation: layers.Accumulation | None) -> layers.TritonLinear:
    if not isinstance(module, layers.TritonLinear):
        raise TypeError(type(module).__name__)
    module.backend, module.accumulation = backend, accumulation
    return module


def unswap(layer: layers.TritonLinear) -> None:
    """Give a swapped layer its own class back; a second call does nothing."""
    for name in ("backend", "accumulation"):
        layer.__dict__.pop(name, None)
    if type(layer) is layers.TritonLinear:  # a class that was made of ours meanwhile stays, parametrized say
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def explain(device: str) -> str:
    """Say which tiles the layers of known models get on a device, and what is lost there."""
    return "\n\n".join(map(str, tile_explanation.of_layers(device)))


class TritonLinear(pl.Callback):
    """Swap linear layers.

    Args:
        min_features: Layers with fewer input or output features stay as they are.
        blocks: Class names or patterns of module names (`blocks.*.mlp`), classes, or a predicate: the layers
            in there are meant; None means all.
        accumulate: Add weight gradients in place where a step has several backward passes.
        backend: `auto`, `torch` or `triton`.

    Raises:
        ConfigError: A value is outside its range, or `blocks` fits nothing.
        ConflictError: `triton` without a GPU.

    Warns:
        NoEffectWarning: No layer was swapped.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TritonLinear(min_features=64)], logger=False, accelerator="cpu")
        >>> TritonLinear(backend="cublas")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: backend='cublas': expected one of auto, torch, triton...
    """

    on_save_checkpoint = checkpoint_stamp.save
    on_load_checkpoint = checkpoint_stamp.load

    def __init__(
        self,
        *,
        min_features: int = 128,
        blocks: Blocks = None,
        accumulate: bool = True,
        backend: str = "auto",
    ) -> None:
        if not is_count(min_features):
            raise ConfigError(key="min_features", value=min_features, allowed="a whole number of at least 1")
        if backend not in dispatch.BACKENDS:
            raise ConfigError(key="backend", value=backend, allowed=f"one of {', '.join(dispatch.BACKENDS)}")
        self.min_features = min_features
        self.blocks = blocks
        self.accumulate = accumulate
        self.backend = backend
        self._accumulation = layers.Accumulation()
        self._swapped: dict[str, layers.TritonLinear] = {}
        self._rows: dict[str, int] = {}
        self._device = torch.device("cpu")
        self._dtype = torch.float32

    def facts(self) -> Facts:
        """State that compiled layers are the compiler's, and that kernels want a GPU."""
        compiled = Rule(
            name="callbacks/torch_compile",
            reason="the compiler computes the layers of what it compiles",
            remedies=("~callbacks.triton_linear", "~callbacks.torch_compile"),
            verdict=Verdict.WARNED,
        )
        no_gpu = Rule(
            name="run/cpu",
            reason="the kernels run on CUDA GPUs, and backend=triton asks for them",
            remedies=("callbacks.triton_linear.backend=auto",),
        )
        asks_in_vain = self.backend == "triton" and not INTERPRETED
        return Facts(provides=(TRANSFORM,), excludes=(compiled, no_gpu) if asks_in_vain else (compiled,))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rules.enforce(self, trainer, pl_module)
        if stage == "fit":
            self._swapped, self._rows, self._accumulation.num_added = {}, {}, 0
            model_surgery.queue(trainer, pl_module, Stage.TILE, self._apply)

    def layers_of(self, model: nn.Module) -> dict[str, layers.TritonLinear]:
        """Swap the layers of a model that are meant, and return them by name; `unswap` takes it back."""
        return swap(
            model,
            min_features=self.min_features,
            blocks=self.blocks,
            backend=self.backend,
            accumulation=self._accumulation if self.accumulate else None,
        )

    def _apply(self, model: nn.Module) -> int:
        new = self.layers_of(model)
        self._swapped |= new
        if not self._swapped:
            text = (
                f"TritonLinear found no linear layer of at least {self.min_features} features: min_features="
            )
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what the layers get, and have weight gradients added where steps are accumulated."""
        self._device = trainer.strategy.root_device
        self._dtype = dtype_of(str(trainer.precision_plugin.precision), self._device.type)
        for name, layer in self._swapped.items():
            self._look(name, layer)
        present = trainer.fit_loop.epoch_loop.automatic_optimization
        if self.accumulate and isinstance(present, lightning_loop.ExactStep):
            present.around_backward = lambda: self._adding(trainer)

    def _look(self, name: str, layer: nn.Module) -> None:
        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._rows[name] = inputs[0].numel() // max(inputs[0].shape[-1], 1)
            handle.remove()

        handle = layer.register_forward_pre_hook(see)

    def _adding(self, trainer: pl.Trainer) -> AbstractContextManager[None]:
        """Let gradients be added, unless DDP waits for them or the strategy keeps them elsewhere."""
        model = trainer.strategy.model
        waits = isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        several = trainer.world_size > 1 and not isinstance(model, DistributedDataParallel)
        elsewhere = several or isinstance(trainer.strategy, lightning_loop.ScalesGradients)
        return nullcontext() if waits or elsewhere else self._accumulation.open()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore(pl_module)

    def _restore(self, module: pl.LightningModule) -> None:
        model_surgery.restore(module)
        for layer in self._swapped.values():
            unswap(layer)

    def outcome(self) -> Outcome:
        """Say how many layers were swapped, who computes them, and how many gradients were added."""
        by_whom: dict[str, list[str]] = {}
        for name, words in self._words():
            by_whom.setdefault(words, []).append(name)
        parts = [f"{len(names)} by {words}" for words, names in by_whom.items()]
        added = self._accumulation.num_added
        did = f"{len(self._swapped)} linear layers swapped"
        did += f": {'; '.join(parts)}" if parts else ""
        did += f"; {added} weight gradients added in place" if self.accumulate else ""
        ours = self.backend == "triton" or any(not words.startswith("torch's") for words in by_whom)
        numbers = {"layers": dict(self._words()), "added_in_place": added}
        return Outcome(did=did, effective=bool(self._rows) and bool(ours or added), numbers=numbers)

    def _words(self) -> Iterator[tuple[str, str]]:
        for name, rows in self._rows.items():
            weight = self._swapped[name].weight
            n, k = shape_of(weight)
            shape = Shape.packed(max(rows, 1), n, k, product_dtype(weight.dtype, self._dtype))
            yield name, dispatch.words(shape, self._device, self.backend)
