"""Save and restore the states of all random generators that a training step or its data uses.

NumPy takes 0.1 ms to return the state of its global generator, because it copies element by element. A retry
of a step needs the state from before the step. So the state is cached until the generator's memory changes.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

RandomStates = dict[str, Any]
"""State of each generator (`torch`, `device`, `python`, `numpy`, other names), in types that a checkpoint may
contain."""
KINDS = (torch.Generator, np.random.Generator)
"""Classes of generators that an object may keep as an attribute."""
Generators = Mapping[str, torch.Generator | np.random.Generator]
"""A user's own generators, by name."""
NO_OTHERS: Generators = MappingProxyType({})
MT19937_BYTES = 625 * 4
"""Size of NumPy's `mt19937_state`: 624 words of 4 bytes, and a position of 4 bytes."""
NumpyState = tuple[bytes, int, int, float]
"""The generator's words and position, whether a normal deviate is cached, and the cached value."""


@lru_cache(maxsize=1)
def _numpy_state_of(memory: bytes) -> NumpyState:
    """Return the state of NumPy's global generator; `memory` (the generator's memory) is the cache key."""
    del memory  # only lru_cache uses the argument
    state: Any = cast(Any, np.random).get_state(legacy=False)
    words, gauss = state["state"], (state["has_gauss"], state["gauss"])
    return words["key"].tobytes(), words["pos"], *gauss


def numpy_state() -> NumpyState:
    """Return the state of NumPy's global generator, which must be an MT19937."""
    generator: Any = cast(Any, np.random).get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        raise TypeError(f"NumPy's global generator is a {type(generator).__name__}, expected an MT19937")
    state = _numpy_state_of(ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES))
    _, _, has_gauss, _ = state
    if has_gauss:
        # `normal` draws two deviates and keeps the second. Using the second does not change the words, so
        # the next state may have the same cache key.
        _numpy_state_of.cache_clear()
    return state


def set_numpy_state(state: NumpyState) -> None:
    """Set a state returned by `numpy_state`."""
    _numpy_state_of.cache_clear()
    key, position, has_gauss, gauss = state
    np.random.set_state(("MT19937", np.frombuffer(key, dtype=np.uint32), position, has_gauss, gauss))


@lru_cache(maxsize=1024)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, KINDS)


def held_by(module: nn.Module) -> dict[str, Any]:
    """Return the generators that a module and its submodules keep as attributes."""
    held = [value for part in module.modules() for value in vars(part).values()]
    return {str(id(value)): value for value in held if _is_generator(type(value))}


def capture(device: torch.device | None = None, generators: Generators = NO_OTHERS) -> RandomStates:
    """Return the states of torch's generators (CPU and `device`), of Python, of NumPy and of `generators`."""
    states: RandomStates = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = numpy_state()
    if device is not None and device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            states[name] = generator.get_state()
        else:
            # As JSON, because a checkpoint may contain tensors and plain values, but no NumPy arrays.
            states[name] = json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())
    return states


def restore(
    states: RandomStates,
    device: torch.device | None = None,
    generators: Generators = NO_OTHERS,
) -> None:
    """Restore the generators of torch, Python and NumPy, and each of `generators` that has a saved state."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    set_numpy_state(states["numpy"])
    # A checkpoint may come from a run on another type of device.
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
    """Return the states that are missing in `others` or differ from the state of the same name."""
    return {
        name: state for name, state in states.items() if name not in others or _differs(state, others[name])
    }


def has_global(states: RandomStates) -> bool:
    """Return whether `states` has a state of a global generator, that is, a name without a dot."""
    return any("." not in name for name in states)


def _differs(state: Any, other: Any) -> bool:
    # Why not `torch.equal`: it needs the values of tensors, which do not exist in a dry run.
    return not np.array_equal(state.numpy(), other.numpy()) if isinstance(state, Tensor) else state != other
