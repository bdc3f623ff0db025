"""Which convolutions a method of PEFT can adapt, and which of them it can merge.

PEFT 0.21 accepts more than it computes: LoRA's own convolutions are neither dilated nor padded as the layer's
(`padding_mode`), so that the adapter sees other pixels and a merged model computes something else; OFT turns
the wrong axes of a kernel, so that it does not start from the unchanged model. Nothing is said, or the first
batch fails with a message about shapes. Such layers are rejected here by name.
"""

from __future__ import annotations

import math
from typing import Any

from peft import PeftConfig
from torch import nn

from lightning_eff.adapters.methods import name_of_method
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.reach import CONVOLUTIONS

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
ADAPTED: dict[str, tuple[type[nn.Module], ...]] = {
    "lora": CONVOLUTIONS,
    "hira": CONVOLUTIONS,
    "loha": (nn.Conv1d, nn.Conv2d),
    "lokr": (nn.Conv1d, nn.Conv2d),
    "ia3": (nn.Conv2d, nn.Conv3d),
    "hra": (nn.Conv2d,),
    "oft": (nn.Conv2d,),
}
"""The convolutions that each method adapts; other methods adapt none. `ln_tuning` trains any layer whole."""


def why_not_adapted(layer: Convolution, method: str, config: Any = None) -> str:
    """Return what of a convolution a method cannot adapt; empty if it can.

    Example:
        >>> why_not_adapted(nn.Conv2d(4, 4, 3, dilation=2), "lora")
        'dilation=(2, 2)'
        >>> why_not_adapted(nn.Conv2d(4, 4, 3, dilation=2), "loha")
        ''
    """
    if method not in ADAPTED:
        return "a convolution"
    if not isinstance(layer, ADAPTED[method]):
        return f"{type(layer).__name__}, and no more than {' and '.join(k.__name__ for k in ADAPTED[method])}"
    is_point = math.prod(layer.kernel_size) == 1
    rank: int = getattr(config, "r", 0)
    reasons = {
        f"padding_mode={layer.padding_mode!r}": method != "ia3" and layer.padding_mode != "zeros",
        f"dilation={layer.dilation}": method in ("lora", "hra", "oft")
        and not is_point
        and any(step > 1 for step in layer.dilation),
        f"padding={layer.padding!r}, other than a number": method == "hra" and isinstance(layer.padding, str),
        f"kernel_size={layer.kernel_size}, other than 1": method == "oft" and not is_point,
        f"groups={layer.groups}": method in ("hira", "hra", "oft") and layer.groups > 1,
        f"groups={layer.groups}, which do not divide r={rank}": method == "lora" and rank % layer.groups > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_convolution(name: str, layer: nn.Module, config: PeftConfig) -> None:
    """Reject a targeted convolution that the method cannot adapt.

    Raises:
        ConfigError: It names the layer, what of it cannot be adapted, and methods that can.
    """
    method = name_of_method(config)
    if not isinstance(layer, CONVOLUTIONS) or method == "ln_tuning":
        return
    reason = why_not_adapted(layer, method, config)
    if reason:
        allowed = f"layers that {method} can adapt: {name} has {reason}"
        allowed = allowed.replace(" has a convolution", " is a convolution").replace(
            " has Conv", " is a Conv"
        )
        others = [other for other in ADAPTED if other != method and not why_not_adapted(layer, other)]
        remedies = [f"callbacks.peft_adapter.method={other}" for other in others]
        raise ConfigError(key="target_modules", value=name, allowed=allowed, remedies=remedies)


def why_not_merged(layer: nn.Module, method: str) -> str:
    """Return what of a convolution keeps PEFT 0.21 from merging an adapter into it; empty if it can."""
    if isinstance(layer, CONVOLUTIONS) and method == "lora" and layer.groups > 1:
        return f"a {type(layer).__name__} with groups={layer.groups}"
    if isinstance(layer, nn.Conv3d) and method in ("lora", "hira") and layer.kernel_size[:2] == (1, 1):
        return f"a Conv3d with kernel_size={layer.kernel_size}, which PEFT takes for one of a Conv2d"
    return ""
