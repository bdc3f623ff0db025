"""Give linear layers the class that computes them in float8, and take it away again."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_linear
from torchao.float8.config import Float8LinearConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from lightning_eff.adapters.module_tree import check_module_names, plain_name
from lightning_eff.kernels.devices import Device
from lightning_eff.precision._float8.choice import reasons, speedup, why_no_float8
from lightning_eff.precision._float8.linear import Float8Linear


def convert_model(
    model: nn.Module, recipe: str, skip: str | Iterable[str], *, all_gather: bool, on: Device | None
) -> tuple[dict[str, tuple[nn.Linear, str]], int]:
    """Convert what gains on a device, or all that can be without one; return the reasons, and how many."""
    skip = [skip] if isinstance(skip, str) else skip
    names = {plain_name(name) for name, _ in model.named_modules() if name}
    check_module_names("skip", [name for name in skip if name != "head"], names)
    present = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    gain = None if on is None else functools.partial(speedup, device=on, recipe=recipe)
    listed = reasons(model, skip, gain) | {name: (layer, "") for name, layer in present.items()}
    if on is not None and (missing := why_no_float8(on)):
        listed = {name: (layer, missing) for name, (layer, _) in listed.items()}
    new = [layer for name, (layer, why) in listed.items() if not why and name not in present]
    for layer in new:
        is_gathered = all_gather and layer.weight.requires_grad
        own = recipe if layer.weight.requires_grad else "rowwise"
        convert(layer, recipe_config(own, emulate=on is None, all_gather=is_gathered))
    return listed, len(new)


def recipe_config(recipe: str, *, emulate: bool, all_gather: bool = False) -> Any:
    """Return torchao's config of a recipe."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, emulate=emulate, enable_fsdp_float8_all_gather=all_gather)


def convert(layer: nn.Linear, config: Any) -> None:
    """Give a linear layer the class that computes it in float8."""
    twin = float8_linear.Float8Linear.from_float(layer, config)
    own = {name: value for name, value in vars(twin).items() if name not in vars(layer)}
    if twin.weight is not layer.weight:  # a subclass that FSDP2 gathers in float8
        layer.weight = twin.weight
        layer.register_state_dict_post_hook(_save_plain)
    layer.__class__ = Float8Linear
    vars(layer).update(own)
    vars(layer)["_float8_attributes"] = tuple(own)


def unconvert(layer: nn.Linear) -> None:
    """Convert a layer back to `nn.Linear`; a second call does nothing.

    A layer whose weight FSDP2 gathers in float8 stays: what it gathers fits this class alone.
    """
    if type(layer) is not Float8Linear or _is_gathered(layer.weight):
        return
    for name in (*vars(layer).pop("_float8_attributes"), "num_rows"):
        vars(layer).pop(name, None)
    layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def _is_gathered(weight: Tensor) -> bool:
    return isinstance(getattr(weight, "_local_tensor", weight), WeightWithDynamicFloat8CastTensor)


def _save_plain(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Put the weight itself into a state dict, in the same memory: checkpoints know nothing of float8."""
    weight: Any = state.get(f"{prefix}weight")
    if not _is_gathered(weight):
        return
    plain: Any = getattr(weight, "_local_tensor", weight)._tensor  # noqa: SLF001
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        plain = DTensor.from_local(
            plain, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state[f"{prefix}weight"] = plain
