"""DeepSpeed's precision plugin, casting no more than a single device would."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from torch import nn
from typing_extensions import override

from lightning_eff.core.dtypes import auto_precision, cast_floats
from lightning_eff.core.errors import TO_DDP, TO_FP32, ConfigError


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
            raise ConfigError(
                key="precision", value=requested, allowed=allowed, remedies=[TO_FP32, TO_DDP]
            ) from error

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return cast_module(module, self.precision)


class FabricZeroPrecision(fabric.DeepSpeedPrecision):
    """The same for Fabric, whose own plugin casts what Lightning's does."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return cast_module(module, self.precision)


def cast_module(module: nn.Module, precision: str) -> nn.Module:
    """Cast a module to the 16-bit dtype of a precision; others change nothing."""
    if not precision.endswith("16-true"):
        return module
    return cast_floats(module, torch.bfloat16 if precision == "bf16-true" else torch.float16)
