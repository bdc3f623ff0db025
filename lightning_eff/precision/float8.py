"""Compute linear layers in float8 where that is faster, with torchao's casts; all else in bfloat16.

GPUs of compute capability 8.9 or later multiply float8 matrices twice as fast as bfloat16 matrices, but each
operand must be cast first, with its own scale. A layer is converted if an arithmetic model predicts that
float8 saves time (in large layers), and if the layer's input and output features are multiples of 16. Heads,
embeddings, routers, adapters and everything outside of the repeated blocks stay in bfloat16. The report lists
each linear layer as converted, or with the reason why it is not converted. Weights keep their dtype, and a
checkpoint is the same as without float8.

`rowwise` uses one scale per row or column (torchtitan's default). `rowwise_with_gw_hp` computes the weight's
gradient in bfloat16. `tensorwise` uses one scale per tensor, which is fastest and least exact. Layers with
frozen weights always use `rowwise`. A scale has a minimum, so that rows of zeros stay zeros.

Saves: time of linear layers with about 4,096 features or more, on an H100 or later.
Costs: without compiled blocks, each cast takes several kernels, and more time than the products save.
    Operands have about 3 bits of precision; sums have the precision of bfloat16.
When not: layers are smaller (the report then gives the reason); blocks are not compiled.
Conflicts: `callbacks/triton_gemm` is rejected, because that callback computes the same layers. `all_gather`
    needs `recipe=tensorwise` and FSDP2 on GPUs. DeepSpeed is rejected, because it casts and gathers weights
    itself.
Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; https://github.com/pytorch/ao
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_eff.adapters.layers import check_module_names, is_in_module, plain_name
from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.errors import (
    TO_BF16_MIXED,
    TO_FSDP2,
    ConfigError,
    EnvironmentLacksError,
    NoEffectWarning,
    Remedy,
    SlowPathWarning,
)
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.machine import FLOAT8_CAPABILITY, gpu_facts
from lightning_eff.core.model_surgery import ADAPTER, Stage, repeated_blocks
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import NEEDS_MATRICES, TRANSFORM, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_count
from lightning_eff.core.torch_private import torch_private
from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.precision.auto import AutoPrecision

Recipe = Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"]
FIRST_STEPS = 10
"""Number of first optimizer steps whose gradients are checked for NaN and infinity."""
NOT_CALLED = "it was not called: code that reads its weight computes in bfloat16"
EMULATED = Remedy("precision.emulate=true", "Float8(emulate=True)")
COMPILED = Remedy("+callbacks=torch_compile", "TorchCompile()")
NO_ALL_GATHER = Remedy("precision.all_gather=false", "Float8(all_gather=False)")

MULTIPLE = 16
"""A float8 product requires that a layer's input and output features are multiples of this number."""
ROWS = 8192
"""Assumed number of tokens (rows) per batch, because layers are chosen before the first batch."""
HIGH_PEAK, LOW_PEAK, BANDWIDTH = 0.7, 0.6, 0.65
"""Estimated fractions of a device's peaks that 16-bit products, float8 products, and casts reach. With these
fractions, the model predicts a gain on an H100 for about the same layers as torchao 0.18's filter (for 4096 x
4096, but not for 2048 x 4096)."""
CAST_BYTES = 5
"""Bytes that a cast moves per 16-bit element: 2 read for the largest magnitude, 2 read again, 1 written."""
CASTS = {"rowwise": (2, 2, 2), "rowwise_with_gw_hp": (1, 2, 1), "tensorwise": (2, 2, 1)}
"""Number of casts of input, weight and gradient per step, by recipe; 2 for scales along both axes."""
FROZEN_CASTS = (1, 2, 1)
ROUTERS = ("router", "gate")
"""Names of routers, which choose experts. An MLP's `gate` has more outputs than inputs, so it is not a
router."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEEDS = f"a GPU of compute capability {FLOAT8_CAPABILITY / 10} or later (RTX 4090, L40S, H100, H200, B200)"


@check_arguments
def to_float8(
    model: nn.Module,
    *,
    recipe: Recipe = "rowwise",
    skip: Sequence[str] = ("head",),
    emulate: bool = False,
    device: str | torch.device = "cuda",
) -> dict[str, str]:
    """Convert the linear layers that become faster, for use with Fabric or in a custom training loop.

    Args:
        model: The model, with adapters, before it is compiled or sharded; layers that are converted already
            stay unchanged.
        recipe: As in `Float8`.
        skip: As in `Float8`.
        emulate: Convert every layer whose features are multiples of 16, and compute with values rounded to
            float8.
        device: Device on which the model will be trained.

    Returns:
        For every linear layer by name, the reason why it is not converted; empty if it is converted.

    Raises:
        ConfigError: A name in `skip` matches nothing.
        EnvironmentLacksError: torchao is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        >>> to_float8(model, emulate=True)
        {'0': '', '2': '64 x 10 features: not multiples of 16'}
    """
    where = torch.device(device)
    is_there = where.type != "cuda" or torch.cuda.is_available()
    found = devices.of(where) if is_there else devices.this_cpu()
    listed, _ = convert_model(model, recipe, skip, all_gather=False, on=None if emulate else found)
    return {name: why for name, (_, why) in listed.items()}


class Float8(AutoPrecision):
    """Compute linear layers in float8 where that is faster; `Trainer(plugins=[Float8()])`.

    Args:
        recipe: `rowwise`, `rowwise_with_gw_hp` or `tensorwise`.
        skip: Names, or ends of names, of modules that stay in bfloat16, including all modules inside them.
        all_gather: Gather weights in float8 under FSDP2, which halves the communication.
        emulate: Round operands to float8 and multiply them in float32, on any device. Emulation is slow; use
            it to test the effect of float8 on the loss. Every layer whose features are multiples of 16 is
            converted.
        precision: Precision of everything else: `bf16-mixed` or `bf16-true`.

    Raises:
        ConfigError: An argument has an unknown value, or a name in `skip` matches nothing.
        ConflictError: Another technique computes the linear layers.
        EnvironmentLacksError: torchao is not installed.

    Warns:
        NoEffectWarning: The device has no float8 products, no layer becomes faster, or no converted layer is
            called.
        SlowPathWarning: No block is compiled, or gradients contain NaN or infinity.

    Example:
        >>> trainer = pl.Trainer(plugins=[Float8(emulate=True)], logger=False, accelerator="cpu")
        >>> Float8(recipe="delayed")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: recipe='delayed': expected one of rowwise, ...
    """

    lowers = ("time",)

    __repr__ = rules.plugin_repr
    stage = Stage.FLOAT8

    @check_arguments
    def __init__(
        self,
        *,
        recipe: Recipe = "rowwise",
        skip: Sequence[str] = ("head",),
        all_gather: bool = False,
        emulate: bool = False,
        precision: Literal["bf16-mixed", "bf16-true"] = "bf16-mixed",
    ) -> None:
        if all_gather and recipe != "tensorwise":
            allowed = "tensorwise with all_gather: only one scale a tensor is known before it is gathered"
            raise ConfigError(key="recipe", value=recipe, allowed=allowed)
        if find_spec("torchao") is None:
            raise EnvironmentLacksError(
                "precision/float8 needs the package torchao\n  try: pip install 'lightning-eff[float8]'"
            )
        super().__init__(precision=precision)
        self.recipe: Recipe = recipe
        self.skip = skip
        self.all_gather = all_gather
        self.emulate = emulate
        self._listed: dict[str, tuple[nn.Linear, str]] = {}
        self._has_compiled = False
        self._graphs_before = 0
        self._steps = self._checked = 0
        self._overflows: Counter[str] = Counter()
        """Number of non-finite gradients in the first steps, by parameter."""

    @override
    def facts(self) -> Facts:
        """Return the requirements for a gain, and the techniques that also compute linear layers."""
        triton = Rule(
            name="callbacks/triton_gemm",
            reason="both compute linear layers",
            remedies=(Remedy("~callbacks.triton_gemm", "remove TritonGemm"), TO_BF16_MIXED),
        )
        needs: list[Rule] = []
        if not self.emulate:
            slow = "each cast is then several kernels, slower than what the products save"
            remedies = (COMPILED,)
            needs.append(
                Rule(name="callbacks/torch_compile", reason=slow, remedies=remedies, verdict=Verdict.WARNED)
            )
            reason, remedies = f"float8 products need {NEEDS}", (TO_BF16_MIXED, EMULATED)
            needs.append(
                Rule(name="machine/float8", reason=reason, remedies=remedies, verdict=Verdict.WARNED)
            )
        if self.all_gather:
            reason, remedies = "only FSDP2 gathers weights in float8", (NO_ALL_GATHER, TO_FSDP2)
            needs.append(Rule(name="strategy/fsdp2", reason=reason, remedies=remedies))
        reason, remedies = "gloo, which connects CPUs, cannot send float8", (NO_ALL_GATHER,)
        gathers = [Rule(name="run/cpu", reason=reason, remedies=remedies)] if self.all_gather else []
        reason = "DeepSpeed casts and gathers weights itself"
        shards = [
            Rule(name=rule.name, reason=reason, remedies=(TO_FSDP2, TO_BF16_MIXED)) for rule in NEEDS_MATRICES
        ]
        return Facts(provides=(TRANSFORM,), needs=tuple(needs), excludes=(triton, *gathers, *shards))

    def assumptions(self) -> list[str]:
        """Return the converted layers in words, because a chart of predicted memory does not show them."""
        outcome = self.outcome()
        return [f"{'' if outcome.effective else 'no effect: '}{outcome.did}"]

    def apply(self, model: nn.Module) -> int:
        """Convert the layers that become faster; a second call does nothing."""
        try:
            self._listed, count = convert_model(
                model,
                self.recipe,
                self.skip,
                all_gather=self.all_gather and self._planned is None,
                on=None if self.emulate else self._device_of(model),
            )
        except ConfigError as error:
            raise error.under("precision") from error
        return count

    def _device_of(self, model: nn.Module) -> devices.Device:
        """Return the GPU for which memory is predicted, or the device of the run."""
        self._settle_device(model)
        trainer: Any = getattr(model, "_trainer", None)
        root: Any = torch.device(str(self.device)) if trainer is None else trainer.strategy.root_device
        return self._planned or devices.of(root)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert layers unless a callback has converted them already; warn if no layer becomes faster."""
        trainer: pl.Trainer | None = getattr(module, "_trainer", None)
        if trainer is not None and self._planned is None:
            rules.enforce(self, trainer, module)  # pyright: ignore[reportArgumentType]
        self.apply(module)
        # The counters start at zero in each fit.
        self._steps, self._checked, self._overflows = 0, 0, Counter()
        whys = Counter(why for _, why in self._listed.values())
        if not whys[""]:
            most = next((why for why, _ in whys.most_common()), "the model has no linear layer")
            text = f"precision/float8 has no effect: {most}"
            remedy = "" if self.emulate else f"\n  try: {EMULATED} (rounds as float8 does, slower)"
            warnings.warn(text + remedy, NoEffectWarning, stacklevel=2)
        self._has_compiled, self._graphs_before = is_compiled(module), num_graphs()
        if whys[""] and not self.emulate and not self._has_compiled:
            text = (
                "precision/float8 is slower than bfloat16 without compiled blocks: a cast is several kernels"
            )
            warnings.warn(f"{text}\n  try: {COMPILED}", SlowPathWarning, stacklevel=2)
        return super().convert_module(module)

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Check the gradients of the first steps; Lightning 2.6 clips gradients after this call."""
        if self._steps < FIRST_STEPS:
            self._steps += 1
            self._check_gradients(model)
        super()._after_closure(model, optimizer)

    def _check_gradients(self, model: nn.Module) -> None:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = sorted(nonfinite(gradients))
        self._checked += bool(gradients)  # empty if an optimizer in the backward pass freed them
        # Only the first occurrence warns; all occurrences are counted.
        if found and not self._overflows:
            text = f"precision/float8: NaN or infinity in {len(found)} gradients of step {self._steps}"
            recipe = Remedy("precision.recipe=rowwise_with_gw_hp", 'Float8(recipe="rowwise_with_gw_hp")')
            text = f"{text}, first {found[0]}\n  try: {recipe}\n  try: a lower learning rate"
            warnings.warn(text, SlowPathWarning, stacklevel=2)
        self._overflows.update(found)

    @override
    def teardown(self) -> None:
        """Convert the layers back to `nn.Linear`."""
        self._note_uncalled()
        self._steps = 0  # below, the layers lose `has_run`
        # Without a converted layer, torchao need not be imported.
        if any(why in ("", NOT_CALLED) for _, why in self._listed.values()):
            from lightning_eff.precision._float8_linear import unconvert

            for layer, _ in self._listed.values():
                unconvert(layer)
        super().teardown()

    def _note_uncalled(self) -> None:
        """Mark converted layers that did not run in any step; other code may read their weights."""
        # Compiled layers do not record `has_run`, and other code than a module may be compiled.
        if not self._steps or self._has_compiled or num_graphs() != self._graphs_before:
            return
        uncalled = {
            name: (layer, NOT_CALLED)
            for name, (layer, why) in self._listed.items()
            if not why and not hasattr(layer, "has_run")
        }
        self._listed |= uncalled
        if uncalled and all(why for _, why in self._listed.values()):
            text = f"precision/float8 has no effect: {NOT_CALLED}"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def outcome(self) -> Outcome:
        """Report the layers in float8, their fraction of all linear layers' products, and overflows."""
        self._note_uncalled()
        if not self._listed:
            return Outcome(did="nothing converted yet", effective=False)
        whys = {name: why or f"float8, {self.recipe}" for name, (_, why) in self._listed.items()}
        products = {name: layer.in_features * layer.out_features for name, (layer, _) in self._listed.items()}
        converted = [name for name, (_, why) in self._listed.items() if not why]
        fraction = sum(products[name] for name in converted) / sum(products.values())
        did = f"{self.recipe} float8 in {len(converted)} of {len(whys)} Linear"
        did += f", {fraction:.0%} of their products" if converted else ""
        did += ", emulated" if converted and self.emulate else ""
        left = Counter(why for _, why in self._listed.values() if why)
        did += "".join(f"; {human_count(count)}: {why}" for why, count in left.most_common(2))
        count = sum(self._overflows.values())
        checked = f"in the first {self._checked} step{'' if self._checked == 1 else 's'}"
        found = f"{count or 'no'} gradients with NaN or infinity {checked}"
        # A prediction runs no real step, so there are no gradients to check.
        if converted and self._planned is None:
            did += f"; {found}" if self._checked else "; gradients not checked for NaN and infinity"
        numbers = {"precision": self.precision, "layers": whys, "fraction": fraction}
        numbers["overflows"] = dict(self._overflows)
        return Outcome(did=did, effective=bool(converted), numbers=numbers)


def num_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return torch_private("torch._dynamo.utils:counters", "precision/float8")["stats"]["unique_graphs"]


def convert_model(
    model: nn.Module, recipe: str, skip: str | Iterable[str], *, all_gather: bool, on: Device | None
) -> tuple[dict[str, tuple[nn.Linear, str]], int]:
    """Convert layers that become faster on a device, or all if `on` is None; return reasons and count."""
    from lightning_eff.precision._float8_linear import Float8Linear, convert, recipe_config

    skip = [skip] if isinstance(skip, str) else skip
    names = {plain_name(name) for name, _ in model.named_modules() if name}
    # `head` is the default, and many models have no module of that name.
    check_module_names("skip", [name for name in skip if name != "head"], names)
    present = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    gain = None if on is None else functools.partial(speedup, device=on, recipe=recipe)
    listed = reasons(model, skip, gain) | {name: (layer, "") for name, layer in present.items()}
    if on is not None and "machine/float8" not in gpu_facts(on.capability):
        missing = f"{'this CPU' if on.is_cpu else on.name} has no float8 products, which need {NEEDS}"
        listed = {name: (layer, missing) for name, (layer, _) in listed.items()}
    new = [layer for name, (layer, why) in listed.items() if not why and name not in present]
    for layer in new:
        # A frozen weight is cast by rows, and scales of rows are not known before the weight is gathered.
        is_gathered = all_gather and layer.weight.requires_grad
        own = recipe if layer.weight.requires_grad else "rowwise"
        convert(layer, recipe_config(own, emulate=on is None, all_gather=is_gathered))
    return listed, len(new)


def speedup(layer: nn.Linear, device: Device, recipe: str, rows: int = ROWS) -> float:
    """Return the speed of a layer's products in float8, casts included, relative to bfloat16.

    Example:
        >>> from lightning_eff.kernels.devices import DEVICES
        >>> layers = [nn.Linear(n, n, device="meta") for n in (1024, 8192)]
        >>> [round(speedup(layer, DEVICES["h100"], "rowwise"), 2) for layer in layers]
        [0.59, 1.29]
    """
    n, k = full_shape(layer.weight)
    is_trained = layer.weight.requires_grad
    # Each of y, dx and dW takes 2 * rows * N * K FLOPs; a frozen weight has no dW.
    num_products = 3 if is_trained else 2
    num_low = 2 if recipe == "rowwise_with_gw_hp" else num_products
    flops = 2.0 * rows * n * k
    high_s = flops / (HIGH_PEAK * device.peak(torch.bfloat16))
    low_s = flops / (LOW_PEAK * device.peak(torch.float8_e4m3fn))
    casts = CASTS[recipe] if is_trained else FROZEN_CASTS
    # Sizes of x, W and dy.
    elements = sum(count * size for count, size in zip(casts, (rows * k, n * k, rows * n), strict=True))
    cast_s = CAST_BYTES * elements / (BANDWIDTH * device.memory_gbs * 1e9)
    # Time in bfloat16, divided by the time of all products plus casts.
    return num_products * high_s / (num_low * low_s + (num_products - num_low) * high_s + cast_s)


def reasons(
    model: nn.Module, skip: Iterable[str], gain: Callable[[nn.Linear], float] | None
) -> dict[str, tuple[nn.Linear, str]]:
    """Return every linear layer by name, with the reason why it is not converted, or an empty text.

    Args:
        model: The model, with adapters.
        skip: Names, or ends of names, of modules that are not converted, including all modules inside them.
        gain: Function that returns a layer's speed in float8 relative to bfloat16. If `gain` is None, every
            possible layer is converted.
    """
    # Hugging Face models return their head from `get_output_embeddings`.
    heads = {id(getattr(module, "get_output_embeddings", lambda: None)()) for module in model.modules()}
    # `weight` is not read, because a parametrized layer would compute it, and spectral_norm counts
    # computations.
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {p for module in embeddings for p in module.parameters(recurse=False)}
    blocks = tuple(f"{name}." for name in repeated_blocks(model))
    adapted = [f"{name}." for name, module in model.named_modules() if name and hasattr(module, ADAPTER)]
    found: dict[str, tuple[nn.Linear, str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        # The name inside of the innermost adapted module, for example `base_layer` or `lora_A.default`.
        inside = name.removeprefix(max((a for a in adapted if name.startswith(a)), key=len, default=""))
        if is_in_module(plain_name(name), skip):
            why = "listed in skip"
        elif id(layer) in heads or not tied.isdisjoint(layer.parameters(recurse=False)):
            why = "the head"
        elif inside != name and inside.partition(".")[0] not in ("base_layer", "modules_to_save"):
            why = "an adapter"
        elif blocks and not name.startswith(blocks):
            why = "outside of the repeated blocks, as heads and embeddings are"
        else:
            why = _why_not(name, layer, gain)
        found[name] = layer, why
    return found


def _why_not(name: str, layer: nn.Linear, gain: Callable[[nn.Linear], float] | None) -> str:
    """Return why a layer of a block is not converted, from its class, its size and the arithmetic model."""
    # A weight that is not a parameter is computed at each call, for example by weight_norm or pruning.
    own = {"forward", "weight", "config"} & vars(layer).keys()  # torchao's layer has a `config` too
    if type(layer) is not nn.Linear or own:
        return f"{type(layer).__name__} may compute more than a linear layer"
    n, k = full_shape(layer.weight)
    if plain_name(name).rpartition(".")[2] in ROUTERS and n < k:
        return "a router"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}"
    if n % MULTIPLE or k % MULTIPLE:
        return f"{k} x {n} features: not multiples of {MULTIPLE}"
    times = gain(layer) if gain is not None else None
    if times is not None and times <= 1.0:
        return f"{k} x {n} features: {times:.2f}x as fast as bfloat16, with its casts"
    return ""
