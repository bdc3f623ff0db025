"""Look up private names of torch when a feature uses them, never at import.

If a version of torch lacks a private name, only the feature that needs this name fails, not the package.
`torch.utils._pytree`, `TorchDispatchMode` and fake tensors are imported directly, because other libraries
depend on them too.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from lightning_eff.core.errors import EnvironmentLacksError


@cache
def torch_private(place: str, feature: str) -> Any:
    """Look up a private name of torch, written as `module:name`, for a feature.

    Raises:
        EnvironmentLacksError: The installed torch lacks the name, so the feature cannot work.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        text = f"torch {torch.__version__} has no {module}.{name}, without which {feature} cannot work"
        raise EnvironmentLacksError(f"{text}\n  try: pip install torch==2.13.0") from error


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context that computes with real tensors, outside of fake tensors and other dispatch modes."""
    return torch_private("torch.utils._python_dispatch:_disable_current_modes", "computing inside a mode")()


def has_gradient_hook(parameter: Any) -> bool:
    """Return whether a parameter has hooks that read or replace its gradient."""
    # The second attribute exists only after its first hook is registered.
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))  # noqa: SLF001


def batch_norm_class() -> Any:
    """Return the base class of all batch norms, including batch norms of other libraries."""
    return torch_private("torch.nn.modules.batchnorm:_BatchNorm", "the search for batch norms")
