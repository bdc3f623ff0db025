"""Compute the linear layers for which it pays in float8, by torchao's casts; everything else in bfloat16.

GPUs from compute capability 8.9 multiply float8 twice as fast as bfloat16, but each operand is cast first,
with a scale of its own. A layer is converted where that saves time by arithmetic: large ones, whose features
are multiples of 16. Heads, embeddings, routers, adapters and what lies outside of the repeated blocks stay in
bfloat16. Each linear layer is in the report, converted or with the reason why not. Weights stay in their
dtype, and a checkpoint is that of the run without float8.

`rowwise` scales each row and each column (torchtitan's default), `rowwise_with_gw_hp` keeps the product of
the weight's gradient in bfloat16, `tensorwise` has one scale for a tensor: fastest, and the least exact.
Frozen weights are `rowwise`. A scale has a floor, so that rows of zeros stay zeros.

Saves: time of linear layers with some 4,096 features or more, on an H100 or later.
Costs: without compiled blocks each cast is several kernels, and slower than what is saved. About 3 bits of
    precision in the operands; sums are exact to bfloat16.
When not: layers are smaller (it leaves those, with the reason); blocks are not compiled.
Conflicts: `callbacks/triton_gemm`, refused: one of them computes a layer. `all_gather` needs
    `recipe=tensorwise` and FSDP2 on GPUs. DeepSpeed, refused: it casts and gathers weights itself.
Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; https://github.com/pytorch/ao
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_eff.core import rules
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, NoEffectWarning, SlowPathWarning
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.model_surgery import Stage
from lightning_eff.core.remedies import format_remedies
from lightning_eff.core.technique import NEEDS_MATRICES, TRANSFORM, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_count
from lightning_eff.kernels import devices
from lightning_eff.precision._float8.choice import NEEDS
from lightning_eff.precision.auto import AutoPrecision

Recipe = Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"]
FIRST_STEPS = 10
"""Optimizer steps whose gradients are checked for NaN and infinity."""
NOT_CALLED = "it was not called: what reads its weight computes in bfloat16"
EMULATED = "precision.emulate=true"
PLAIN = "precision=bf16_mixed"


@check_arguments
def to_float8(
    model: nn.Module,
    *,
    recipe: Recipe = "rowwise",
    skip: Sequence[str] = ("head",),
    emulate: bool = False,
    device: str | torch.device = "cuda",
) -> dict[str, str]:
    """Convert the linear layers of a model that gain; for Fabric, or a loop of your own.

    Args:
        model: Before it is compiled or sharded, and with its adapters; converted layers stay as they are.
        recipe: As in `Float8`.
        skip: As in `Float8`.
        emulate: Convert every layer whose features are multiples of 16, and compute with values that are
            rounded to float8.
        device: Where it will be trained.

    Returns:
        Every linear layer of the model by name: empty where it is converted, else why not.

    Raises:
        ConfigError: A name in `skip` matches nothing.
        EnvironmentLacksError: torchao is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        >>> to_float8(model, emulate=True)
        {'0': '', '2': '64 x 10 features: not multiples of 16'}
    """
    from lightning_eff.precision._float8.conversion import convert_model

    where = torch.device(device)
    is_there = where.type != "cuda" or torch.cuda.is_available()
    found = devices.of(where) if is_there else devices.this_cpu()
    listed, _ = convert_model(model, recipe, skip, all_gather=False, on=None if emulate else found)
    return {name: why for name, (_, why) in listed.items()}


class Float8(AutoPrecision):
    """Compute linear layers in float8 where that is faster; `Trainer(plugins=[Float8()])`.

    Args:
        recipe: `rowwise`, `rowwise_with_gw_hp` or `tensorwise`.
        skip: Names, or ends of names, of modules that stay in bfloat16, with all modules in them.
        all_gather: Gather weights in float8 under FSDP2, at half the communication.
        emulate: Round operands to float8 and multiply them in float32, on any device: slower, to try what
            float8 does to a loss. Every layer whose features are multiples of 16 is converted.
        precision: Of everything else: `bf16-mixed`, or `bf16-true`.

    Raises:
        ConfigError: An argument has another value, or a name in `skip` matches nothing.
        ConflictError: Something else computes the layers.
        EnvironmentLacksError: torchao is not installed.

    Warns:
        NoEffectWarning: The device has no float8 products, or no layer gains.
        SlowPathWarning: No block is compiled; gradients are not finite.

    Example:
        >>> trainer = pl.Trainer(plugins=[Float8(emulate=True)], logger=False, accelerator="cpu")
        >>> Float8(recipe="delayed")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: recipe='delayed': expected one of rowwise, ...
    """

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
            text = "precision/float8 needs the package torchao\n  try: pip install 'lightning-eff[float8]'"
            raise EnvironmentLacksError(text)
        super().__init__(precision=precision)
        self.recipe: Recipe = recipe
        self.skip = skip
        self.all_gather = all_gather
        self.emulate = emulate
        self._listed: dict[str, tuple[nn.Linear, str]] = {}
        self._has_compiled = False
        self._steps = self._checked = 0
        self._overflows: Counter[str] = Counter()
        """Of the first steps: gradients that were not finite, by parameter."""

    @override
    def facts(self) -> Facts:
        """Return what float8 needs to be faster, and who else computes linear layers."""
        triton = Rule(
            name="callbacks/triton_gemm",
            reason="both compute linear layers",
            remedies=("~callbacks.triton_gemm", PLAIN),
        )
        needs: list[Rule] = []
        if not self.emulate:
            slow = "each cast is then several kernels, slower than what the products save"
            remedies = ("+callbacks=torch_compile",)
            needs.append(
                Rule(name="callbacks/torch_compile", reason=slow, remedies=remedies, verdict=Verdict.WARNED)
            )
            reason, remedies = f"float8 products need {NEEDS}", (PLAIN, EMULATED)
            needs.append(
                Rule(name="machine/float8", reason=reason, remedies=remedies, verdict=Verdict.WARNED)
            )
        if self.all_gather:
            reason, remedies = "only FSDP2 gathers weights in float8", ("precision.all_gather=false",)
            needs.append(Rule(name="strategy/fsdp2", reason=reason, remedies=(*remedies, "strategy=fsdp2")))
        reason, remedies = "gloo, which connects CPUs, cannot send float8", ("precision.all_gather=false",)
        gathers = [Rule(name="run/cpu", reason=reason, remedies=remedies)] if self.all_gather else []
        reason = "DeepSpeed casts and gathers weights itself"
        shards = [
            Rule(name=rule.name, reason=reason, remedies=("strategy=fsdp2", PLAIN)) for rule in NEEDS_MATRICES
        ]
        return Facts(provides=(TRANSFORM,), needs=tuple(needs), excludes=(triton, *gathers, *shards))

    def assumptions(self) -> list[str]:
        """Return which layers a prediction has converted, since a chart of bytes does not show it."""
        outcome = self.outcome()
        return [f"{'' if outcome.effective else 'no effect: '}{outcome.did}"]

    def apply(self, model: nn.Module) -> int:
        """Convert the layers that gain; a second call finds nothing to do."""
        from lightning_eff.precision._float8.conversion import convert_model

        try:
            self._listed, count = convert_model(
                model,
                self.recipe,
                self.skip,
                all_gather=self.all_gather and self._planned is None,
                on=None if self.emulate else self._device_of(model),
            )
        except ConfigError as error:
            group = "precision"
            raise error.under(group) from error
        return count

    def _device_of(self, model: nn.Module) -> devices.Device:
        """Return the GPU of a prediction, or the device of the run."""
        self._settle_device(model)
        trainer: Any = getattr(model, "_trainer", None)
        root: Any = torch.device(str(self.device)) if trainer is None else trainer.strategy.root_device
        return self._planned or devices.of(root)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert what no callback has caused to be converted before; warn where nothing is gained."""
        trainer: pl.Trainer | None = getattr(module, "_trainer", None)
        if trainer is not None and self._planned is None:
            rules.enforce(self, trainer, module)  # pyright: ignore[reportArgumentType]
        self.apply(module)
        self._steps, self._checked, self._overflows = 0, 0, Counter()
        whys = Counter(why for _, why in self._listed.values())
        if not whys[""]:
            most = next((why for why, _ in whys.most_common()), "the model has no linear layer")
            text = f"precision/float8 has no effect: {most}"
            remedy = "" if self.emulate else f"\n  try: {EMULATED} (rounds as float8 does, slower)"
            warnings.warn(text + format_remedies(remedy), NoEffectWarning, stacklevel=2)
        self._has_compiled = any(map(_is_compiled, module.modules()))
        if whys[""] and not self.emulate and not self._has_compiled:
            text = (
                "precision/float8 is slower than bfloat16 without compiled blocks: a cast is several kernels"
            )
            remedy = format_remedies("  try: +callbacks=torch_compile")
            warnings.warn(f"{text}\n{remedy}", SlowPathWarning, stacklevel=2)
        return super().convert_module(module)

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Check the gradients of the first steps; Lightning 2.6 calls this before it clips them."""
        if self._steps < FIRST_STEPS:
            self._steps += 1
            self._check_gradients(model)
        super()._after_closure(model, optimizer)

    def _check_gradients(self, model: nn.Module) -> None:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = sorted(nonfinite(gradients))
        self._checked += bool(gradients)  # an optimizer in the backward pass has freed them
        if found and not self._overflows:
            text = f"precision/float8: NaN or infinity in {len(found)} gradients of step {self._steps}"
            remedies = "  try: precision.recipe=rowwise_with_gw_hp\n  try: a lower learning rate"
            text = f"{text}, first {found[0]}\n{format_remedies(remedies)}"
            warnings.warn(text, SlowPathWarning, stacklevel=2)
        self._overflows.update(found)

    @override
    def teardown(self) -> None:
        """Convert the layers back."""
        self._note_uncalled()
        if any(not why for _, why in self._listed.values()):
            from lightning_eff.precision._float8.conversion import unconvert

            for layer, _ in self._listed.values():
                unconvert(layer)
        super().teardown()

    def _note_uncalled(self) -> None:
        """Note the layers that did not run while others did: something else may read their weights."""
        ran = [hasattr(layer, "num_rows") for layer, why in self._listed.values() if not why]
        if any(ran) and not self._has_compiled:  # a compiled layer counts no rows
            for name, (layer, why) in self._listed.items():
                if not why and not hasattr(layer, "num_rows"):
                    self._listed[name] = layer, NOT_CALLED

    @override
    def outcome(self) -> Outcome:
        """Return the layers in float8, their part of all linear layers' products, and overflows."""
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
        if converted and self._planned is None:
            did += f"; {found}" if self._checked else "; gradients not checked for NaN and infinity"
        numbers = {"precision": self.precision, "layers": whys, "fraction": fraction}
        numbers["overflows"] = dict(self._overflows)
        return Outcome(did=did, effective=bool(converted), numbers=numbers)


def _is_compiled(module: nn.Module) -> bool:
    forward: Callable[..., Any] | None = vars(module).get("forward")
    return isinstance(forward, CompiledCall) or getattr(module, "_compiled_call_impl", None) is not None
