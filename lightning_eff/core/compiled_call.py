"""A compiled method of a module, usually `forward`; the module can still be copied and saved.

`callbacks/torch_compile` uses this class. Why not `nn.Module.compile()`: it silently does nothing for modules
of PyTorch's own classes, such as `TransformerEncoderLayer`. `nn.Module.compile()` would also compile hooks,
such as the hooks of gradient checkpointing. Why not a bare `torch.compile(module.forward)` on the instance: a
copy of the module would still use the weights of the original module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class CompiledCall:
    """Calls a bound method through the compiler; in a copy of the module, the method is compiled again."""

    def __init__(self, method: Callable[..., Any], options: dict[str, Any]) -> None:
        self.__wrapped__ = method
        """The original method; `inspect.signature` and Lightning's `is_overridden` read this attribute."""
        self.options = options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile on the first call, then run the compiled method."""
        # Compile late, because techniques may still change the module after this object was created.
        if self._compiled is None:
            self._compiled = torch.compile(self.__wrapped__, **self.options)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiled method, which is bound to this module's weights."""
        return self.__dict__ | {"_compiled": None}


def compiled_attributes(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return, by name, a module's instance attributes that call the compiler; empty for a plain module."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, CompiledCall)}
    if vars(module).get("_compiled_call_impl") is not None:  # nn.Module.compile (private in torch 2.13)
        found["_compiled_call_impl"] = vars(module)["_compiled_call_impl"]
    if "_orig_mod" in dict(module.named_children()):  # torch.compile(module)
        found["forward"] = vars(module)["forward"]
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether this package, `nn.Module.compile` or `torch.compile` compiled a module or submodule.

    Example:
        >>> is_compiled(nn.Linear(1, 1))
        False
    """
    return any(compiled_attributes(child) for child in module.modules())
