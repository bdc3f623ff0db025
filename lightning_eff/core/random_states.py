"""The states of all random generators that a training step or its data uses, in plain types."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

RandomStates = dict[str, Any]
"""By generator: `torch`, `device`, `python`, `numpy`, and others by name; in types for a checkpoint."""
KINDS = (torch.Generator, np.random.Generator)
"""Classes of generators that an object may keep as an attribute."""
Generators = Mapping[str, torch.Generator | np.random.Generator]
"""A user's own generators, by name."""
NO_OTHERS: Generators = MappingProxyType({})


def held_by(module: nn.Module) -> dict[str, Any]:
    """Return the generators that a module and its submodules keep as attributes."""
    held = [value for part in module.modules() for value in vars(part).values()]
    return {str(id(value)): value for value in held if isinstance(value, KINDS)}


def capture(device: torch.device | None = None, generators: Generators = NO_OTHERS) -> RandomStates:
    """Return the states of torch's CPU generator, the device's, Python's, NumPy's and `generators`."""
    states: RandomStates = {"torch": torch.get_rng_state(), "python": random.getstate()}
    legacy: Any = cast(Any, np.random).get_state(legacy=False)
    if legacy["bit_generator"] == "MT19937":  # NumPy's default; others belong to whoever set them
        key, position = legacy["state"]["key"].tobytes(), legacy["state"]["pos"]
        states["numpy"] = (key, position, legacy["has_gauss"], legacy["gauss"])
    if device is not None and device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            states[name] = generator.get_state()
        else:
            states[name] = json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())
    return states


def restore(
    states: RandomStates,
    device: torch.device | None = None,
    generators: Generators = NO_OTHERS,
) -> None:
    """Set the generators to those of their states that are present."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        key, *others = states["numpy"]
        np.random.set_state(("MT19937", np.frombuffer(key, dtype=np.uint32), *others))
    if "device" in states and device is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    for name, generator in generators.items():
        if name not in states:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(states[name])
        else:
            generator.bit_generator.state = json.loads(states[name])


def differing(states: RandomStates, others: RandomStates) -> RandomStates:
    """Return the states that differ from the states of the same name in `others`."""
    return {
        name: state for name, state in states.items() if name not in others or _differs(state, others[name])
    }


def has_global(states: RandomStates) -> bool:
    """Return whether any of these states is global, so that more than a loader's own sampler uses it."""
    return any("." not in name for name in states)


def _differs(state: Any, other: Any) -> bool:
    # Not `torch.equal`, which needs values, and a dry run has none.
    return not np.array_equal(state.numpy(), other.numpy()) if isinstance(state, Tensor) else state != other
