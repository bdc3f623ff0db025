"""A forward or a method that is compiled where it stands, and still copied and saved with its module.

Why not `nn.Module.compile()`: it does nothing, without a word, for modules whose class is PyTorch's own (a
`TransformerEncoderLayer`, a `CrossEntropyLoss`), and it compiles hooks too, checkpointing's among them.
Why not a bare `torch.compile(module.forward)` on the instance: in a copy of the module it would still run the
original's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class CompiledCall:
    """Calls a bound method through the compiler; a copy of the module gets one of its own.

    Args:
        method: Bound to the module in whose `__dict__` this object takes its place.
        options: `torch.compile`'s.
    """

    def __init__(self, method: Callable[..., Any], options: dict[str, Any]) -> None:
        self.method = method
        self.options = options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile on the first call, then run what was compiled."""
        if self._compiled is None:
            self._compiled = torch.compile(self.method, **self.options)
        return self._compiled(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself: whoever asks for the signature, or whether it is overridden, looks through."""
        return self.method

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was compiled: it belongs to this module's weights."""
        return self.__dict__ | {"_compiled": None}


def is_compiled(module: nn.Module) -> bool:
    """Say whether a part of the module is compiled, by us, by `nn.Module.compile` or by a wrapper.

    Example:
        >>> is_compiled(nn.Linear(1, 1))
        False
    """
    return any(
        getattr(child, "_compiled_call_impl", None) is not None
        or hasattr(child, "_orig_mod")
        or any(isinstance(value, CompiledCall) for value in child.__dict__.values())
        for child in module.modules()
    )
