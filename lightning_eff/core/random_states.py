"""The states of all random generators that a training step or its data draw from, as plain tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

RandomStates = dict[str, Tensor]
"""A tensor of bytes for each generator: `torch`, `device`, `python`, `numpy`, and others by name."""
KINDS = (torch.Generator, np.random.Generator)
"""Classes of generators that an object may keep as an attribute."""
Generators = Mapping[str, torch.Generator | np.random.Generator]
"""Generators of a user's own, by name."""
NO_OTHERS: Generators = MappingProxyType({})


def held_by(module: nn.Module) -> dict[str, Any]:
    """Return the generators that a module and the modules inside it keep as attributes."""
    held = [value for part in module.modules() for value in vars(part).values()]
    return {str(id(value)): value for value in held if isinstance(value, KINDS)}


def capture(device: torch.device | None = None, generators: Generators = NO_OTHERS) -> RandomStates:
    """Return the states of torch's CPU generator, the device's, Python's, NumPy's and of others."""
    version, words, gauss = random.getstate()
    del version
    legacy: Any = cast(Any, np.random).get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state(),
        "python": _bytes(np.array(words, dtype=np.uint32), gauss),
    }
    if legacy["bit_generator"] == "MT19937":  # NumPy's default; others belong to whoever set them
        key, position = legacy["state"]["key"], legacy["state"]["pos"]
        words = np.append(key, [position]).astype(np.uint32)
        states["numpy"] = _bytes(words, legacy["gauss"] if legacy["has_gauss"] else None)
    if device is not None and device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            states[name] = generator.get_state()
        else:
            text = json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())
            states[name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return states


def restore(
    states: Mapping[str, Tensor],
    device: torch.device | None = None,
    generators: Generators = NO_OTHERS,
) -> None:
    """Set the generators whose states are there to these states."""
    torch.set_rng_state(states["torch"])
    words, gauss = _words(states["python"])
    random.setstate((3, tuple(words.tolist()), gauss))
    if "numpy" in states:
        words, gauss = _words(states["numpy"])
        has_gauss = int(gauss is not None)
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), has_gauss, gauss or 0.0))
    if "device" in states and device is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    for name, generator in generators.items():
        if name not in states:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(states[name])
        else:
            generator.bit_generator.state = json.loads(states[name].numpy().tobytes())


def differing(states: RandomStates, others: RandomStates) -> RandomStates:
    """Return the states that differ from the ones of the same name in `others`."""
    # Not `torch.equal`, which asks for values that there are none of in a dry run.
    return {
        name: state
        for name, state in states.items()
        if name not in others or not np.array_equal(state.numpy(), others[name].numpy())
    }


def has_global(states: RandomStates) -> bool:
    """Return whether there are states among these that more than a loader's own sampler draws from."""
    return any("." not in name for name in states)


def _bytes(words: Any, gauss: float | None) -> Tensor:
    """Return unsigned words, and the second normal number of a pair if it is still to be drawn, as bytes."""
    tail = b"" if gauss is None else np.float64(gauss).tobytes()
    return torch.frombuffer(bytearray(words.tobytes() + tail), dtype=torch.uint8)


def _words(state: Tensor) -> tuple[Any, float | None]:
    raw = state.numpy().tobytes()
    size = 625 * 4
    gauss = float(np.frombuffer(raw[size:], dtype=np.float64)[0]) if len(raw) > size else None
    return np.frombuffer(raw[:size], dtype=np.uint32), gauss
