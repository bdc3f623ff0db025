"""DeepSpeed's precision plugin, casting no more than a single device would."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.core.dtypes import auto_precision
from lightning_eff.core.errors import ConfigError


class ZeroPrecision(DeepSpeedPrecision):
    """The precision of another plugin, by DeepSpeed.

    Lightning 2.6 calls `module.to(dtype)`, also under 32-true: float64 buffers would lose digits, and complex
    ones (rotary embeddings) their imaginary part.

    Args:
        plugin: As the Trainer has it.
        device_type: On which `auto` chooses.

    Raises:
        ConfigError: DeepSpeed has no such precision.
    """

    def __init__(self, plugin: Precision, device_type: str) -> None:
        requested: Any = plugin.precision
        chosen: Any = auto_precision(device_type)[0] if requested == "auto" else requested
        try:
            super().__init__(chosen)
        except ValueError as error:
            allowed = "bf16-mixed, bf16-true, 16-mixed, 16-true or 32-true under DeepSpeed"
            remedies = ["precision=fp32", "strategy=ddp"]
            raise ConfigError(key="precision", value=requested, allowed=allowed, remedies=remedies) from error

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not self.precision.endswith("16-true"):
            return module
        dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float16

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        apply: Any = module._apply  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return apply(cast)  # as `to` does, but for complex numbers
