"""Choose number formats: the dtype of the weights, and the dtype of matrix products.

`bf16-mixed` and `16-mixed` keep float32 weights and cast the operands of matrix products (autocast).
`bf16-true` keeps all tensors in bfloat16, except complex tensors. `32-true` casts nothing. `auto` chooses
`bf16-mixed` if the device computes bfloat16 natively, otherwise `32-true`, and reports the reason. PyTorch
runs bfloat16 on every CPU, but emulated bfloat16 is several times slower.

This plugin differs from Lightning's MixedPrecision in three ways. Autocast caches the cast copy of each
weight for one training step, so if a layer is used four times, its weight is cast and saved once. Evaluation
caches no copies. The strategy determines the device; no device is guessed from an accelerator's name.
Gradients are unscaled before clipping for every optimizer, so `fused` AdamW can be combined with clipping.

Saves: time, and memory for activations, through matrix products in 16 bits on devices that support them.
Costs: bf16 has 8 bits of precision. fp16 overflows above 65504, so the loss is scaled, and a step whose
    gradients overflow is skipped. Mixed formats add a copy of each weight during the step, so a large model
    with a small batch can need more memory.
When not: the device emulates the format; `auto` then chooses float32 and reports the reason.
Conflicts: Lightning rejects `Trainer(precision=...)` with this plugin. fp16 with LBFGS is rejected.
Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740;
    https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.dtypes import auto_precision, cast_floats, dtype_support
from lightning_eff.core.errors import (
    TO_AUTO_PRECISION,
    TO_BF16_MIXED,
    TO_FP32,
    ConfigError,
    NoEffectWarning,
    SlowPathWarning,
)
from lightning_eff.core.technique import Facts, Outcome, Rule, Try, Verdict
from lightning_eff.core.text import human_bytes, human_count
from lightning_eff.kernels.devices import AMPERE, Device
from lightning_eff.report.advice import MIN_TIME, Observed, Suggestion
from lightning_eff.report.step_time import PRODUCTS

Format = Literal["bf16-mixed", "16-mixed", "bf16-true", "32-true"]
COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "32-true": torch.float32,
}
CAST_LAYERS = (
    nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Layers whose matrix products autocast computes in the low format."""
LIGHTNING_KEY = "MixedPrecision"
"""Key under which Lightning 2.6's own plugin stores the state of its scaler in a checkpoint."""
AS_REQUESTED = "as requested"
_backends: Any = torch.backends  # the stubs lack `fp32_precision` and its owners
CUDA_MATMUL, CPU_MATMUL = _backends.cuda.matmul, _backends.mkldnn.matmul
CUDNN = (_backends.cudnn.conv, _backends.cudnn.rnn)
PARENTS = (_backends, _backends.cudnn)
"""Switches from which CUDA's switches inherit: the global one, then cudnn's, which covers all of CUDA."""


@contextlib.contextmanager
def step_context(precision: str, device_type: str, *, keep_casts: bool = True) -> Generator[None]:
    """Return the context for the forward pass of one step, for loops without a Trainer.

    Args:
        precision: One of `COMPUTE_DTYPES`.
        device_type: `cpu`, `cuda`, ...
        keep_casts: Cache each weight's cast copy until the context ends.
    """
    dtype = COMPUTE_DTYPES[precision]
    if precision.endswith("-mixed"):
        with torch.autocast(device_type, dtype=dtype, cache_enabled=keep_casts):
            yield
        return
    if precision == "32-true":
        yield
        return
    # With `bf16-true`, new tensors of the step have the weights' dtype, as in Lightning's own plugin.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class AutoPrecision(Precision):
    """Compute in a low-precision format where it is safe; `Trainer(plugins=[AutoPrecision()])`.

    Args:
        precision: `auto`, `bf16-mixed`, `16-mixed`, `bf16-true` or `32-true`.
        device: Device type for autocast; None for the strategy's device.
        tf32: Compute float32 matrix products and convolutions on CUDA in TF32 (10 bits of precision); None
            leaves PyTorch's switches unchanged. The switches are restored at the end of the run.
        keep_casts: Cache the cast copy of each weight for one training step. Copies are not cached in manual
            optimization, where weights change within the step.

    Raises:
        ConfigError: `precision` has an unknown value, or LBFGS is used with `16-mixed`.

    Warns:
        SlowPathWarning: The device emulates the format.
        NoEffectWarning: No layer of the model is cast (autocast casts no float64), or TF32 is requested
            without CUDA.

    Example:
        >>> trainer = pl.Trainer(
        ...     plugins=[AutoPrecision(precision="bf16-mixed")], logger=False, accelerator="cpu"
        ... )
        >>> AutoPrecision(precision="bf16")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: precision='bf16': expected 'auto', or one of bf16-mixed, ...
    """

    lowers = ("activations", "time")
    try_as = (
        Try(),
        Try(option="precision/bf16_mixed", changes="computes in 16 bits"),
        Try(option="precision/bf16_true", changes="keeps weights in 16 bits"),
    )

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this plugin if float32 products dominate the time on a device that computes bfloat16."""
        share, precision = run.time_share(PRODUCTS), str(run.trainer.precision)
        faster, reason = auto_precision(run.module.device.type)
        if share < MIN_TIME or run.small_operations or precision != "32-true" or faster == precision:
            return None
        why = f"matrix products in float32 take {share:.0%} of the time; {reason}, with 8 bits of precision"
        return Suggestion(technique=AutoPrecision(), why=why)

    __repr__ = rules.plugin_repr
    _slow_text = "precision={0!r} will be slow: {1}; precision='auto' would choose {2!r}"
    """Placeholders: the precision, the reason, and the choice of `auto`."""

    @check_arguments
    def __init__(
        self,
        *,
        precision: Literal["auto"] | Format = "auto",
        device: str | torch.device | None = None,
        tf32: bool | None = None,
        keep_casts: bool = True,
    ) -> None:
        self.precision: Any = precision
        self.device = device
        self.tf32 = tf32
        self.keep_casts = keep_casts
        self.scaler: torch.amp.GradScaler | None = None
        self._planned: Device | None = None
        """The GPU for which memory is predicted, instead of the Trainer's device; None in a run."""
        self._steps_inside = False
        """Whether optimizers step within a training step, which makes earlier casts of weights stale."""
        self._reason = AS_REQUESTED
        self._cast_layers: dict[str, str] = {}
        self._bytes_before = self._bytes_after = 0
        self._restore_tf32: Callable[[], None] | None = None

    def facts(self) -> Facts:
        """Return the rule for a device that emulates the format."""
        dtype, reason = COMPUTE_DTYPES.get(self.precision), f"{self.precision} will be slow"
        verdict = Verdict.WARNED
        if dtype is None:
            dtype, reason = torch.bfloat16, "auto chooses 32-true, which is faster there"
            verdict = Verdict.ADJUSTED
        name = f"machine/emulated_{str(dtype).removeprefix('torch.')}"
        rule = Rule(name=name, reason=reason, remedies=(TO_AUTO_PRECISION,), verdict=verdict)
        return Facts(excludes=(rule,))

    def join_prediction(self, gpu: Device | None) -> bool:
        """Choose the format for the GPU for which memory is predicted, independent of this machine."""
        self._planned = gpu
        if gpu is not None and self.precision == "auto":
            self.precision = "bf16-mixed" if gpu.capability >= AMPERE else "32-true"
        return True

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Choose format and device, convert weights in place if the format requires it, and count layers."""
        trainer: pl.Trainer | None = getattr(module, "_trainer", None)
        # Check before anything is cast, so that a checkpoint of another run is rejected early.
        if trainer is not None and trainer.ckpt_path is not None:
            checkpoint_stamp.check_on_restore(trainer)
        self._steps_inside = isinstance(module, pl.LightningModule) and not module.automatic_optimization
        device_type = self._settle_device(module)
        if self.precision == "auto":
            self.precision, self._reason = auto_precision(device_type)
        dtype = COMPUTE_DTYPES[self.precision]
        support = dtype_support(device_type, dtype)
        if not support.native:
            text = self._slow_text.format(self.precision, support.why, auto_precision(device_type)[0])
            warnings.warn(text, SlowPathWarning, stacklevel=2)
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(device_type)
        if self.tf32 and device_type != "cuda":
            text = f"tf32=True has no effect on {device_type}: TF32 is a format of NVIDIA GPUs"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        # Only once, so that a second fit does not mistake the changed switches for the user's settings.
        if self.tf32 is not None and device_type == "cuda" and self._restore_tf32 is None:
            self._restore_tf32 = set_tf32(enabled=self.tf32)
        self._bytes_before = sum(parameter.nbytes for parameter in module.parameters())
        if self.precision == "bf16-true":
            cast_floats(module, dtype)
        self._bytes_after = sum(parameter.nbytes for parameter in module.parameters())
        if dtype == torch.float32:
            return module
        is_true = self.precision.endswith("-true")  # then all layers with parameters are cast
        # Autocast leaves products in float64 unchanged.
        self._cast_layers = {
            name: type(layer).__name__
            for name, layer in module.named_modules()
            if (isinstance(layer, CAST_LAYERS) and all(p.dtype != torch.float64 for p in layer.parameters()))
            or (is_true and next(layer.parameters(recurse=False), None) is not None)
        }
        if not self._cast_layers:
            text = f"precision={self.precision!r} has no effect: no linear, convolution or recurrent layer"
            text += ", except in float64" * any(p.dtype == torch.float64 for p in module.parameters())
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return module

    def _settle_device(self, module: nn.Module) -> str:
        if self.device is None:
            if not isinstance(module, pl.LightningModule):
                allowed = "a device type, for example cpu, for a module without a Trainer"
                raise ConfigError(key="device", value=None, allowed=allowed)
            self.device = module.trainer.strategy.root_device.type
        return torch.device(self.device).type

    @override
    def teardown(self) -> None:
        """Restore PyTorch's TF32 switches."""
        if self._restore_tf32 is not None:
            self._restore_tf32()
            self._restore_tf32 = None

    @override
    def train_step_context(self) -> AbstractContextManager[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        precision = "32-true" if self.precision == "auto" else self.precision  # `auto` until convert_module
        keep_casts = self.keep_casts and not self._steps_inside
        return step_context(precision, str(self.device), keep_casts=keep_casts)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        precision = "32-true" if self.precision == "auto" else self.precision
        return step_context(precision, str(self.device), keep_casts=False)

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        # New layers have the low dtype from the start, so that no float32 copy of the model exists.
        is_low = self.precision == "bf16-true"
        return step_context("bf16-true", "cpu") if is_low else contextlib.nullcontext()

    tensor_init_context = module_init_context

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(
            data, dtype=Tensor, function=lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t
        )

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)  # gradients become scale * d(loss)/d(weight)
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step the optimizer; if there is a scaler, unscale the gradients before hooks and clipping."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            allowed = "another format with LBFGS, which evaluates the loss several times per step"
            remedies = [TO_BF16_MIXED, TO_FP32]
            raise ConfigError(key="precision", value=self.precision, allowed=allowed, remedies=remedies)
        # The closure runs the backward pass, so gradients can be unscaled only after it.
        result = closure()
        # With nothing to unscale, the scaler's `step` would raise an error.
        is_skipped = result is None and model.automatic_optimization  # training_step returned None
        if not is_skipped:
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)  # Lightning 2.6: on_before_optimizer_step, then clipping
        if is_skipped:
            return result
        step_output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return step_output

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Move the scaler's state to the key of Lightning's plugin, so that either plugin can resume."""
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[LIGHTNING_KEY] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.load_state_dict(checkpoint.get(LIGHTNING_KEY, {}))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def outcome(self) -> Outcome:
        """Report the format, the reason for it, and the layers that were cast."""
        is_requested = self._reason == AS_REQUESTED and self.precision != "auto"
        is_float32 = is_requested and self.precision == "32-true" and not self.tf32
        device = self.device or "an unknown device"
        name = "float32" if is_float32 else self.precision
        did = f"{name} on {device} (as requested)" if is_requested else f"{name} on {device}: {self._reason}"
        kinds = Counter(self._cast_layers.values())
        if kinds:
            did += "; cast " + ", ".join(f"{human_count(n)} {kind}" for kind, n in kinds.most_common())
        if self._bytes_after != self._bytes_before:
            did += f"; parameters {human_bytes(self._bytes_before)} -> {human_bytes(self._bytes_after)}"
        has_run = self.device is not None
        is_effective = (is_float32 and has_run) or bool(self._cast_layers) or self._restore_tf32 is not None
        numbers = {"precision": self.precision, "device": self.device, "layers": dict(self._cast_layers)}
        numbers["parameter_bytes"] = self._bytes_after
        return Outcome(did=did, effective=is_effective, numbers=numbers)


def set_tf32(*, enabled: bool) -> Callable[[], None]:
    """Switch TF32 for float32 products, convolutions and RNNs on CUDA; return a function that undoes this.

    Since 2.9 PyTorch has two sets of switches. Products follow the newer set, which has an `fp32_precision`
    per operation, per backend and globally. The value "none" inherits from the next level. The older set is
    `allow_tf32` and `set_float32_matmul_precision`. Writing an older switch also updates the newer switches,
    but reading an older switch raises an error if the two disagree.

    This function sets the newer switches, and also the older switches that can be read. So code that reads an
    older switch during the run raises no error. Examples are torch.compile's max-autotune, and
    `torch.backends.cudnn.flags` around a CTC loss. If an older switch cannot be read because of the user's
    settings, it is left unchanged.
    """
    precision, undo = "tf32" if enabled else "ieee", ExitStack()
    if _is_tf32(CUDA_MATMUL) != enabled:
        undo.callback(_restorer([CUDA_MATMUL, CPU_MATMUL]))  # the older switch sets both of these
        # The two sets of switches must agree, or reading the older switch raises an error.
        older = _readable(torch.get_float32_matmul_precision)
        if older is not None:
            undo.callback(torch.set_float32_matmul_precision, older)
            torch.set_float32_matmul_precision("high" if enabled else "highest")
        CUDA_MATMUL.fp32_precision = precision
    # Switches that have the requested value already are left alone.
    differing = [switch for switch in CUDNN if _is_tf32(switch) != enabled]
    if differing:
        undo.callback(_restorer(differing))
        older = _readable(lambda: _backends.cudnn.allow_tf32)
        if older is not None:
            undo.callback(setattr, _backends.cudnn, "allow_tf32", older)
            _backends.cudnn.allow_tf32 = enabled
        for switch in differing:
            switch.fp32_precision = precision
    return undo.close


def _is_tf32(switch: Any) -> bool:
    return switch.fp32_precision == "tf32"


def _readable(read: Callable[[], Any]) -> Any:
    """Return the value of an older switch; None if reading the switch raises an error."""
    try:
        return read()
    except RuntimeError:
        return None


def _restorer(switches: Sequence[Any]) -> Callable[[], None]:
    """Return a function that restores the state of switches; a switch with an inherited value gets `none`."""
    found, own = [switch.fp32_precision for switch in switches], _own_precisions(switches)

    def restore() -> None:
        for switch, precision, set_here in zip(switches, found, own, strict=True):
            switch.fp32_precision = set_here
            if switch.fp32_precision != precision:  # cuDNN's initial TF32, which `none` does not restore
                switch.fp32_precision = precision

    return restore


def _own_precisions(switches: Sequence[Any]) -> list[str]:
    """Return each switch's own setting; `none` means that a switch follows its parent."""
    inherited: list[str] = []
    for parent in PARENTS:  # from the top, so that a parent inherits nothing when it is read
        inherited.append(parent.fp32_precision)
        parent.fp32_precision = "none"
    seen: list[list[str]] = []
    # A switch that follows the global switch shows both values in turn; a switch with its own setting shows
    # one value twice.
    for precision in ("tf32", "ieee"):
        PARENTS[0].fp32_precision = precision
        seen.append([switch.fp32_precision for switch in switches])
    for parent, precision in zip(PARENTS, inherited, strict=True):
        parent.fp32_precision = precision
    return [first if first == second else "none" for first, second in zip(*seen, strict=True)]
