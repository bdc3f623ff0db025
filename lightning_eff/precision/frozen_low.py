"""Frozen weights in few bits, what is trained in float32: QLoRA, together with adapters.

What is trained is small beside adapters; what a run has to hold is the model that stays as it is. `nf4`,
`fp4` and `int8` quantize the frozen linear layers through bitsandbytes, on the CPU too: 4 bits and a scale a
block, the scales in 8 bits themselves (`double_quant`): 4.13 bits a weight. That happens before adapters are
made, so it asks beforehand what will be frozen: with PeftAdapter all but `modules_to_save`, else the layers
that are frozen already. The head of a Hugging Face model, weights that two modules share and all other layers
stay as they were loaded. `bf16` and `fp16` cast frozen matrices, embeddings among them, and the biases beside
them, once adapters are in and before a checkpoint is read; weights of norms stay.

Everything that is trained is float32 from then on, also in a model that was loaded in bfloat16. Products are
computed as under `precision/mixed`, in the format `compute`. The packed weights are what a checkpoint holds,
and are taken from it as they are.

Costs: the error that the report names, 9 % of a weight's norm in nf4, 11 in fp4, 0.5 in int8; each pass
    computes the weights anew. A 16-bit embedding gives a residual stream of 16 bits: name it in `skip` if
    that is too few.
Conflicts: nothing frozen, or nothing trained, is refused. Strategies that shard weights; float64; biases of
    quantized layers in training (`bias` of LoRA's). `callbacks/triton_gemm` leaves quantized layers alone.
Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; https://huggingface.co/docs/bitsandbytes
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_eff.adapters import quantized
from lightning_eff.core import model_surgery, rules
from lightning_eff.core.dtypes import auto_precision, dtype_support
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, SlowPathWarning
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.technique import NEW_PARAMETERS, PLACES_STATE, TRANSFORM, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_bytes
from lightning_eff.precision._quantized import frozen
from lightning_eff.precision.mixed import COMPUTE_DTYPES, Mixed

QUANTIZED = ("nf4", "fp4", "int8")
CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPUTE = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_LOST = 0.5
"""Share of a weight's norm: several times what a format loses of any weights that were trained."""
ADAPTERS = ("+callbacks=peft_adapter",)


class FrozenLow(Mixed):
    """Keep what is frozen in few bits and what is trained in float32; `Trainer(plugins=[FrozenLow()])`.

    Args:
        weights: `nf4`, `fp4`, `int8`, `bf16` or `fp16`.
        compute: Of products: `bf16`, `fp16`, `fp32`, or `auto`: that of 16-bit weights, else bf16 where the
            device computes it natively.
        double_quant: Keep the scales of 4-bit blocks in 8 bits.
        blocksize: Weights that share a scale, in 4 bits.
        skip: Names, or the ends of them, of modules that stay as they are, with all that is in them.
        device: Device type for autocast; None takes the strategy's.

    Raises:
        ConfigError: A value is none of these; nothing is frozen, or nothing is trained; a layer cannot be
            low, or would lose most of its weight.
        EnvironmentLacksError: bitsandbytes is not installed.

    Warns:
        SlowPathWarning: The device emulates the format that products are computed in.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_eff.callbacks.peft_adapter import PeftAdapter
        >>> trainer = pl.Trainer(
        ...     plugins=[FrozenLow()], callbacks=[PeftAdapter()], logger=False, accelerator="cpu"
        ... )
        >>> FrozenLow(weights="int4")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: weights='int4': expected one of nf4, fp4, int8, bf16, fp16
    """

    __repr__ = rules.plugin_repr
    stage = Stage.QUANTIZE

    def __init__(
        self,
        *,
        weights: str = "nf4",
        compute: str = "auto",
        double_quant: bool = True,
        blocksize: int = 64,
        skip: Sequence[str] | None = None,
        device: str | None = None,
    ) -> None:
        for key, value, known in (
            ("weights", weights, (*QUANTIZED, *CAST)),
            ("compute", compute, ("auto", *COMPUTE)),
            ("blocksize", blocksize, BLOCK_SIZES),
        ):
            if value not in known:
                raise ConfigError(key=key, value=value, allowed=f"one of {', '.join(map(str, known))}")
        if weights in CAST and compute not in ("auto", weights):
            allowed = f"{weights} or auto: weights of 16 bits are computed with as they are"
            raise ConfigError(key="compute", value=compute, allowed=allowed)
        if weights in QUANTIZED and find_spec("bitsandbytes") is None:
            remedy = "pip install 'lightning-eff[qlora]'"
            text = f"weights={weights!r} needs the package bitsandbytes\n  try: {remedy}"
            raise EnvironmentLacksError(text)
        products = weights if weights in CAST else compute
        super().__init__(precision=COMPUTE.get(products, "auto"), device=device)
        self.weights = weights
        self.compute = compute
        self.double_quant = double_quant
        self.blocksize = blocksize
        self.skip = [skip] if isinstance(skip, str) else skip
        self._errors: dict[str, float] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._trained = (0, 0)

    @override
    def facts(self) -> Facts:
        """State who else would own the frozen weights."""
        reason = "it shards parameters of one format, and low ones have statistics beside them"
        sharded = [replace(rule, reason=reason, remedies=("strategy=ddp",)) for rule in PLACES_STATE]
        thaws = Rule(
            name="lightning/BaseFinetuning",
            reason="it thaws weights that have too few bits to be trained",
            remedies=("remove it",),
        )
        left = Rule(
            name="callbacks/triton_gemm",
            reason="quantized layers compute their own products, so it swaps what is left",
            remedies=("~callbacks.triton_gemm",),
            verdict=Verdict.WARNED,
        )
        if self.weights in CAST:
            return Facts(provides=(TRANSFORM,), excludes=(*sharded, thaws))
        return Facts(provides=(TRANSFORM, NEW_PARAMETERS), excludes=(*sharded, thaws, left))

    def apply(self, model: nn.Module) -> int:
        """Quantize the linear layers that will be frozen; a model that has its low layers stays as it is.

        Args:
            model: With its weights loaded, before it gets adapters; in a loop of one's own, frozen already.
        """
        with _under_precision():
            return self._quantize(model)

    def _quantize(self, model: nn.Module) -> int:
        self._settle(model)
        layers = frozen.linear_layers(model, self.skip or ())
        if self.weights in CAST:
            return 0
        staying = model_surgery.frozen_modules(model, layers)
        meant = {name: layer for name, layer in layers.items() if name in staying}
        present = {n: part for n, part in model.named_modules() if quantized.is_quantized(part)}
        if not meant and not present:
            allowed = "bf16 or fp16, as no linear layer is frozen: weights of so few bits cannot learn"
            raise ConfigError(key="weights", value=self.weights, allowed=allowed, remedies=ADAPTERS)
        if meant:
            self._errors, self._sizes = {}, {}
        for name, layer in meant.items():
            self._quantize_layer(name, layer)
        for name, part in present.items():
            num_bytes = quantized.num_bytes(part.parameters(recurse=False))
            self._sizes.setdefault(name.replace(".base_layer", ""), (num_bytes, num_bytes))
        return len(meant)

    def _quantize_layer(self, name: str, layer: nn.Linear) -> None:
        from lightning_eff.precision._quantized.quantized_linear import quantize

        if layer.weight.is_meta or layer.weight.dtype == torch.float64:
            has = "no values yet" if layer.weight.is_meta else "64 bits"
            allowed = f"a model with weights of at most 32 bits in memory: {name} has {has}"
            raise ConfigError(key="weights", value=self.weights, allowed=allowed)
        before = quantized.num_bytes(layer.parameters())
        self._errors[name] = quantize(
            layer,
            self.weights,
            compute=COMPUTE_DTYPES[self.precision],
            blocksize=self.blocksize,
            double_quant=self.double_quant,
        )
        if not self._errors[name] < MOST_LOST:  # nor is what is no number
            allowed = f"a format that can hold {name}: {self._errors[name]:.0%} of its norm would be lost"
            remedies = (f"precision.skip=[{name}]",)
            raise ConfigError(key="weights", value=self.weights, allowed=allowed, remedies=remedies)
        self._sizes[name] = (before, quantized.num_bytes(layer.parameters()))

    def cast_frozen(self, model: nn.Module) -> int:
        """Cast frozen matrices, and what is trained to float32.

        Args:
            model: With its adapters.
        """
        with _under_precision():
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self._refuse_untrainable(model, trained)
            count = sum(_cast(p, torch.float32) for p in trained.values() if p.is_floating_point())
            self._trained = (len(trained), quantized.num_bytes(trained.values()))
            return count + (self._lower_frozen(model) if self.weights in CAST else 0)

    def _lower_frozen(self, model: nn.Module) -> int:
        found, count = dict(frozen.matrices(model, self.skip or ())), 0
        if not found:
            allowed = "a model with frozen weights: all of them are trained"
            raise ConfigError(key="weights", value=self.weights, allowed=allowed, remedies=ADAPTERS)
        self._sizes = {name: sizes for name, sizes in self._sizes.items() if name in found}
        for name, parameter in found.items():
            before = parameter.nbytes
            changed = _cast(parameter, CAST[self.weights])
            if changed or name not in self._sizes:
                self._sizes[name] = (before, parameter.nbytes)
            count += changed
        return count

    def _refuse_untrainable(self, model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
        trainer: Any = getattr(model, "_trainer", None)
        if not trained and (trainer is None or trainer.training):
            allowed = "a model of which something is trained"
            raise ConfigError(key="weights", value=self.weights, allowed=allowed, remedies=ADAPTERS)
        frozen.refuse_trained(model)

    def _settle(self, model: nn.Module) -> None:
        """Choose the format of products: a model that was loaded in 16 bits is computed with in them."""
        device_type = self._settle_device(model)
        loaded = {parameter.dtype for parameter in model.parameters()}
        for word in (word for word, dtype in CAST.items() if dtype in loaded):
            if self.precision == "auto":
                self.precision, self._reason = COMPUTE[word], "the model was loaded in it"
            elif self.precision != COMPUTE[word]:
                key = "weights" if self.weights in CAST else "compute"
                allowed = f"{word}, which the model was loaded in: its norms refuse other inputs"
                raise ConfigError(key=key, value=getattr(self, key), allowed=allowed)
        if self.precision == "auto":
            self.precision, self._reason = auto_precision(device_type)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Settle how products are computed; weights were changed before, or are cast now.

        Raises:
            ConfigError: Nothing was quantized, as no callback of ours was there to have it done in time.
        """
        if self.weights in QUANTIZED and not any(map(quantized.is_quantized, module.modules())):
            allowed = "bf16 or fp16 without adapters: quantizing comes before a checkpoint is read"
            raise ConfigError(key="precision.weights", value=self.weights, allowed=allowed, remedies=ADAPTERS)
        self.lower(module)
        return super().convert_module(module)

    @override
    def _warn_if_emulated(self, device_type: str, dtype: torch.dtype) -> None:
        answer = dtype_support(device_type, dtype)
        if not answer.native:
            text = f"products in {self.precision} will be slow: {answer.why}"
            warnings.warn(text, SlowPathWarning, stacklevel=2)

    @override
    def outcome(self) -> Outcome:
        """Say how many layers are low, what they took and take, and how much of them was lost."""
        before, after = (sum(sizes[i] for sizes in self._sizes.values()) for i in (0, 1))
        kind = "layers" if self.weights in QUANTIZED else "parameters"
        did = f"{self.weights} in {len(self._sizes)} frozen {kind}"
        did += f", {human_bytes(before)} -> {human_bytes(after)}"
        worst = max(self._errors, key=lambda name: self._errors[name], default=None)
        did += f", at most {self._errors[worst]:.2%} lost ({worst})" if worst is not None else ""
        did += f"; {self._trained[0]} parameters trained in float32, {human_bytes(self._trained[1])}"
        did += f"; products in {self.precision}: {self._reason}"
        numbers = {
            "precision": self.precision,
            "layers": {name: size for name, (_, size) in self._sizes.items()},
            "bytes_before": before,
            "bytes_after": after,
            "errors": dict(self._errors),
        }
        return Outcome(did=did, effective=bool(self._sizes), numbers=numbers)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Cast a parameter in place, and say whether that changed it."""
    changed = parameter.dtype != dtype
    if changed:
        parameter.data = parameter.data.to(dtype)
    return changed


@contextmanager
def _under_precision() -> Generator[None]:
    """Tell an error with the path of the setting in front of its key."""
    try:
        yield
    except ConfigError as error:
        group = "precision"
        raise error.under(group) from error
