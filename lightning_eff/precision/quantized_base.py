"""Quantize frozen weights, and train all other weights in float32; with adapters, this is QLoRA.

With adapters, the frozen model takes most of the memory. `nf4`, `fp4` and `int8` quantize frozen linear
layers with bitsandbytes, also on a CPU. In 4-bit formats, each block of weights has one scale, and
`double_quant` quantizes the scales to 8 bits; a weight then takes 4.13 bits. Layers are quantized before
adapters are added, so the layers that will be frozen are determined in advance. With PeftAdapter, all layers
except `modules_to_save` will be frozen. Otherwise, the layers that are frozen already stay frozen. The head
of a Hugging Face model, tied weights and all other layers are unchanged. `bf16` and `fp16` cast frozen
matrices, embeddings included, and the biases of their layers. This cast happens after adapters are added and
before a checkpoint is read; norms are unchanged.

All trained parameters become float32, even in a model that was loaded in bfloat16. Matrix products are
computed in `compute_dtype`, as under `precision/auto`. A checkpoint holds the packed weights, which are
loaded unchanged.

Saves: memory for frozen weights; a weight takes 4.13 bits in NF4, 8 in int8, 16 in bfloat16.
Costs: rounding errors, which the report states (9 % of a weight's norm in nf4, 11 % in fp4, 0.5 % in int8).
    Each pass dequantizes the weights. With a 16-bit embedding, the residual stream has 16 bits; if these are
    too few bits, add the embedding to `skip_modules`.
When not: the frozen weights fit in memory in bfloat16; nothing is frozen (such a run is rejected).
Conflicts: models without frozen weights or without trained weights, strategies that shard weights, float64
    weights, and trained biases of quantized layers (LoRA's `bias`) are rejected. `callbacks/triton_gemm` does
    not replace quantized layers.
Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; https://huggingface.co/docs/bitsandbytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.adapters.layers import check_module_names, is_in_module, is_quantized, plain_name
from lightning_eff.core import model_surgery, rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.dtypes import auto_precision
from lightning_eff.core.errors import TO_DDP, ConfigError, EnvironmentLacksError, Remedy
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.technique import (
    NEW_PARAMETERS,
    PLACES_STATE,
    QUANTIZED_WEIGHTS,
    TRANSFORM,
    Facts,
    Outcome,
    Rule,
    Verdict,
)
from lightning_eff.core.text import human_bytes
from lightning_eff.precision.auto import COMPUTE_DTYPES, AutoPrecision, Format

QUANTIZED = ("nf4", "fp4", "int8")
CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS: dict[str, Format] = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}
"""Lightning's precision for each `compute_dtype`."""
NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Layers that on some devices require inputs in their weights' dtype; a cast would save little memory."""
MAX_ERROR = 0.5
"""Largest accepted error, as a fraction of a weight's norm; trained weights have far smaller errors."""
ADAPTERS = (Remedy("+callbacks=peft_adapter", "PeftAdapter()"),)


def _without(name: str) -> Remedy:
    return Remedy(f"precision.skip_modules=[{name}]", f"QuantizedBase(skip_modules=[{name!r}])")


class QuantizedBase(AutoPrecision):
    """Keep frozen weights in few bits and trained weights in float32; `Trainer(plugins=[QuantizedBase()])`.

    Args:
        quant_type: Format of frozen weights: `nf4`, `fp4`, `int8`, `bf16` or `fp16`.
        compute_dtype: Dtype of matrix products: `bf16`, `fp16`, `fp32`, or `auto`. `auto` chooses the dtype
            of the weights if they have 16 bits; otherwise bf16 if the device computes bf16 natively, else
            fp32.
        double_quant: Quantize the scales of 4-bit blocks to 8 bits.
        blocksize: Number of weights per scale, in 4-bit formats.
        skip_modules: Names, or ends of names, of modules that are neither quantized nor cast, including all
            modules inside them.
        device: Device type for autocast; None for the strategy's device.

    Raises:
        ConfigError: An argument has an unknown value; no weight is frozen, or no weight is trained; a layer
            cannot be quantized, or its error would exceed half of the weight's norm.
        EnvironmentLacksError: bitsandbytes is not installed.

    Warns:
        SlowPathWarning: The device emulates the dtype of matrix products.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_eff.callbacks.peft_adapter import PeftAdapter
        >>> trainer = pl.Trainer(
        ...     plugins=[QuantizedBase()], callbacks=[PeftAdapter()], logger=False, accelerator="cpu"
        ... )
        >>> QuantizedBase(quant_type="int4")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: quant_type='int4': expected one of nf4, fp4, int8, bf16, fp16
    """

    lowers = ("parameters",)

    __repr__ = rules.plugin_repr
    _slow_text = "matrix products in {0} will be slow: {1}"
    stage = Stage.QUANTIZE

    @check_arguments
    def __init__(
        self,
        *,
        quant_type: Literal["nf4", "fp4", "int8", "bf16", "fp16"] = "nf4",
        compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
        double_quant: bool = True,
        blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64,
        skip_modules: Sequence[str] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if quant_type in CAST and compute_dtype not in ("auto", quant_type):
            allowed = f"{quant_type} or auto: 16-bit weights are not cast for matrix products"
            raise ConfigError(key="compute_dtype", value=compute_dtype, allowed=allowed)
        if quant_type in QUANTIZED and find_spec("bitsandbytes") is None:
            remedy = "pip install 'lightning-eff[qlora]'"
            raise EnvironmentLacksError(
                f"quant_type={quant_type!r} needs the package bitsandbytes\n  try: {remedy}"
            )
        # Weights that are cast to 16 bits are multiplied in that dtype, without autocast's copies.
        products = quant_type if quant_type in CAST else compute_dtype
        super().__init__(precision=PRECISIONS.get(products, "auto"), device=device)
        self.quant_type = quant_type
        self.compute_dtype = compute_dtype
        self.double_quant = double_quant
        self.blocksize = blocksize
        self.skip_modules = [skip_modules] if isinstance(skip_modules, str) else skip_modules
        self._errors: dict[str, float] = {}
        self._bytes: dict[str, tuple[int, int]] = {}
        """Bytes before and after the conversion, by name of layer or parameter."""
        self._num_trained = self._trained_bytes = 0

    @override
    def facts(self) -> Facts:
        """Return the conflicts of quantized weights."""
        reason = "it shards parameters of one dtype, and quantized ones have scales too"
        sharded = [replace(rule, reason=reason, remedies=(TO_DDP,)) for rule in PLACES_STATE]
        finetuning = Rule(
            name="lightning/BaseFinetuning",
            reason="it unfreezes weights that have too few bits to be trained",
            remedies=("remove it",),
        )
        if self.quant_type in CAST:
            return Facts(provides=(TRANSFORM,), excludes=(*sharded, finetuning))
        kernels = Rule(
            name="callbacks/triton_gemm",
            reason="it replaces only the layers that are not quantized",
            remedies=(Remedy("~callbacks.triton_gemm", "remove TritonGemm"),),
            verdict=Verdict.WARNED,
        )
        provides = (TRANSFORM, NEW_PARAMETERS, QUANTIZED_WEIGHTS)
        return Facts(provides=provides, excludes=(*sharded, finetuning, kernels))

    @override
    def join_prediction(self, gpu: object) -> bool:
        """Keep `auto`, because a model that is loaded in 16 bits decides the format."""
        del gpu
        return True

    def apply(self, model: nn.Module) -> int:
        """Quantize the linear layers that will be frozen; layers that are quantized already stay unchanged.

        Args:
            model: The model with loaded weights, before adapters are added. In a custom loop, freeze the
                model first.
        """
        self._settle_precision(model)
        layers = linear_layers(model, self.skip_modules or ())
        if self.quant_type in CAST:
            return 0
        from lightning_eff.precision._quantized_linear import quantize

        # Adapters are not attached yet, so `model_surgery` returns the layers that adapters will freeze.
        frozen = model_surgery.frozen_modules(model, layers)
        new = {name: layer for name, layer in layers.items() if name in frozen}
        present = {name: layer for name, layer in model.named_modules() if is_quantized(layer)}
        if not new and not present:
            raise self._quant_type_error(
                "bf16 or fp16, since no linear layer is frozen and quantized weights cannot be trained"
            )
        # A second call without new layers keeps the errors and bytes of the first call.
        if new:
            self._errors, self._bytes = {}, {}
        options: dict[str, Any] = {"blocksize": self.blocksize, "double_quant": self.double_quant}
        for name, layer in new.items():
            if layer.weight.is_meta or layer.weight.dtype == torch.float64:
                has = "is on the meta device" if layer.weight.is_meta else "has 64 bits"
                raise self._quant_type_error(
                    f"a model with weights of at most 32 bits in memory: {name} {has}", ()
                )
            before, dtype = storage_bytes(layer.parameters()), COMPUTE_DTYPES[self.precision]
            error = quantize(layer, self.quant_type, compute_dtype=dtype, **options)
            if not error < MAX_ERROR:  # true for NaN too
                raise self._quant_type_error(
                    f"a format that can hold {name}: {error:.0%} of its norm would be lost", (_without(name),)
                )
            self._errors[name] = error
            self._bytes[name] = (before, storage_bytes(layer.parameters()))
        for name, layer in present.items():
            num_bytes = storage_bytes(layer.parameters(recurse=False))
            self._bytes.setdefault(plain_name(name), (num_bytes, num_bytes))
        return len(new)

    def cast_frozen(self, model: nn.Module) -> int:
        """Cast frozen matrices to 16 bits if requested, and trained parameters and adapters to float32."""
        trained = [p for p in model.parameters() if p.requires_grad]
        # Evaluation needs no trained parameters.
        trainer: Any = getattr(model, "_trainer", None)
        if not trained and (trainer is None or trainer.training):
            raise self._quant_type_error("a model with trained parameters")
        for name, module in model.named_modules():
            # bitsandbytes casts a quantized layer's bias in place, so a trained bias would train in 16 bits.
            if is_quantized(module) and any(p.requires_grad for p in module.parameters(recurse=False)):
                plain = plain_name(name)
                allowed = f"[{plain}], or a frozen bias: {plain} is quantized, and its bias is trained"
                no_bias = Remedy(
                    "callbacks.peft_adapter.options.bias=none", "PeftAdapter(options={'bias': 'none'})"
                )
                key, remedies = "precision.skip_modules", (no_bias, _without(plain))
                raise ConfigError(key=key, value=None, allowed=allowed, remedies=remedies)
        low = [p for p in trained if p.is_floating_point() and p.dtype != torch.float32]
        for parameter in low:
            # `.data` keeps the parameter the same object, which optimizers may hold already.
            parameter.data = parameter.data.to(torch.float32)
        self._num_trained, self._trained_bytes = len(trained), storage_bytes(trained)
        if self.quant_type not in CAST:
            return len(low)
        found, dtype = dict(matrices(model, self.skip_modules or ())), CAST[self.quant_type]
        if not found:
            raise self._quant_type_error("a model with frozen weights: all of its weights are trained")
        high = {name: parameter.nbytes for name, parameter in found.items() if parameter.dtype != dtype}
        for name in high:
            found[name].data = found[name].data.to(dtype)
        sizes = {name: (high.get(name, p.nbytes), p.nbytes) for name, p in found.items()}
        # In a second call the matrices are cast already; the bytes from before the first cast are kept.
        self._bytes = {n: size if n in high else self._bytes.get(n, size) for n, size in sizes.items()}
        return len(low) + len(high)

    def _settle_precision(self, model: nn.Module) -> None:
        """Choose the dtype of matrix products; a model that was loaded in 16 bits decides that dtype."""
        device_type = self._settle_device(model)
        loaded = {parameter.dtype for parameter in model.parameters()}
        for name in (name for name, dtype in CAST.items() if dtype in loaded):
            if self.precision == "auto":
                self.precision, self._reason = PRECISIONS[name], "the model was loaded in it"
            elif self.precision != PRECISIONS[name]:
                key = "quant_type" if self.quant_type in CAST else "compute_dtype"
                allowed = f"{name}, in which the model was loaded: its norms reject inputs of another dtype"
                raise ConfigError(key=f"precision.{key}", value=getattr(self, key), allowed=allowed)
        if self.precision == "auto":
            self.precision, self._reason = auto_precision(device_type)

    def _quant_type_error(self, allowed: str, remedies: Sequence[Remedy] = ADAPTERS) -> ConfigError:
        return ConfigError(
            key="precision.quant_type", value=self.quant_type, allowed=allowed, remedies=remedies
        )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare matrix products, and cast weights to 16 bits unless they are cast already.

        Raises:
            ConfigError: No layer was quantized, because no callback of lightning_eff triggered quantization
                in time.
        """
        if self.quant_type in QUANTIZED and not any(map(is_quantized, module.modules())):
            raise self._quant_type_error(
                "bf16 or fp16 without adapters: layers are quantized before a checkpoint is read"
            )
        self.cast_frozen(module)
        return super().convert_module(module)

    @override
    def outcome(self) -> Outcome:
        """Report the number of converted layers, their bytes before and after, and the largest error."""
        before, after = (sum(sizes[i] for sizes in self._bytes.values()) for i in (0, 1))
        count = len(self._bytes)
        kind = "layer" if self.quant_type in QUANTIZED else "parameter"
        did = f"{self.quant_type} in {count} frozen {kind}{'' if count == 1 else 's'}"
        did += f", {human_bytes(before)} -> {human_bytes(after)}"
        worst = max(self._errors, key=lambda name: self._errors[name], default=None)
        did += f", at most {self._errors[worst]:.2%} lost ({worst})" if worst is not None else ""
        did += f"; {self._num_trained} parameter{'' if self._num_trained == 1 else 's'} trained in float32"
        did += f", {human_bytes(self._trained_bytes)}; matrix products in {self.precision}: {self._reason}"
        numbers = {
            "precision": self.precision,
            "layers": {name: size for name, (_, size) in self._bytes.items()},
            "bytes_before": before,
            "bytes_after": after,
            "errors": dict(self._errors),
        }
        return Outcome(did=did, effective=bool(self._bytes), numbers=numbers)


def modules_without(model: nn.Module, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, except modules listed in `skip_modules` (by ends of names) and their children.

    Raises:
        ConfigError: A name matches no module.
    """
    modules = {plain_name(name) for name, _ in model.named_modules() if name}
    check_module_names("precision.skip_modules", skip_modules, modules)
    for name, module in model.named_modules():
        if not is_in_module(plain_name(name), skip_modules):
            yield name, module


def linear_layers(model: nn.Module, skip_modules: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that can be quantized, by name.

    These layers are excluded: subclasses of `nn.Linear`, which may compute something else; layers that share
    a weight with another module; output embeddings of Hugging Face models.
    """
    # Count modules per parameter, because another module with the same weight would read codes as values.
    num_modules = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    heads = [getattr(module, "get_output_embeddings", lambda: None)() for module in model.modules()]
    return {
        name: module
        for name, module in modules_without(model, skip_modules)
        if type(module) is nn.Linear
        and not any(module is head for head in heads)
        and all(num_modules[id(p)] == 1 for p in module.parameters(recurse=False))
    }


def matrices(model: nn.Module, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the frozen matrices, and the biases of their layers, by name."""
    for name, module in modules_without(model, skip_modules):
        own = dict(module.named_parameters(recurse=False))
        # Norms, and layers without a matrix, are small: a cast would save little.
        if isinstance(module, NORMS) or all(parameter.ndim < 2 for parameter in own.values()):
            continue
        for key, parameter in own.items():
            if parameter.is_floating_point() and not parameter.requires_grad:
                yield f"{name}.{key}".strip("."), parameter


def quantization_tensors(parameter: Tensor) -> list[Tensor]:
    """Return the scales and code tables that dequantize a parameter; empty if it is not quantized."""
    state: Any = getattr(parameter, "quant_state", None)
    scale: Any = getattr(parameter, "SCB", None)
    tensors = [scale] if scale is not None else []
    if state is not None:
        tensors += [state.absmax, state.code]
        tensors += [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return tensors


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of parameters and their scales; shared memory counts once."""
    tensors = [t for parameter in parameters for t in (parameter, *quantization_tensors(parameter))]
    # Count by address: tied weights share an address, and so do tables that all layers share.
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
