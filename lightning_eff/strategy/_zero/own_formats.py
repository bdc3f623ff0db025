"""What keeps its format when DeepSpeed's precision casts a model: else digits and imaginary parts are lost.

The plugin casts everything to one format by `module.to(dtype)`, under 32-true too, where one device casts
nothing. What ZeRO trains must be of that format; buffers and what is frozen need not be.
"""

from __future__ import annotations

from torch import nn

from lightning_eff.core.shards import is_sharded


class OwnFormats:
    """Buffers and frozen parameters as they are before a cast.

    Args:
        module: That will be cast.
        precision: Lightning's name of the cast. Only 32-true leaves every format alone; the others do so
            with complex buffers, which have no 16 bits to go to.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.register_buffer("phase", nn.Buffer(1j * module.weight.detach()))
        >>> formats = OwnFormats(module, "bf16-true")
        >>> module.phase = module.phase.real
        >>> formats.put_back()
        >>> module.phase.dtype
        torch.complex64
    """

    def __init__(self, module: nn.Module, precision: str) -> None:
        all_formats = precision == "32-true"
        self._buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if all_formats or buffer.is_complex()
        ]
        frozen = [p for p in module.parameters() if not (p.requires_grad or is_sharded(p))]
        self._frozen = [(parameter, parameter.data) for parameter in frozen if all_formats]

    def put_back(self) -> None:
        """Give them back what the cast has changed."""
        for owner, name, buffer in self._buffers:
            setattr(owner, name, buffer)
        for parameter, data in self._frozen:
            parameter.data = data
