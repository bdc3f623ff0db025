"""Training-efficiency techniques for PyTorch Lightning; each technique is one plugin.

Public names are imported on first use (PEP 562), so `import lightning_eff` imports neither torch nor
Lightning. The name of a technique leads to its file: `lightning_eff.EmptyCache` is in
`callbacks/empty_cache.py`. `make stubs` writes `__init__.pyi`, which has the types of all public names.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

TECHNIQUE_FOLDERS = (
    "callbacks",
    "precision",
    "strategy",
    "checkpoint_io",
    "optimizer",
    "scheduler",
    "monitors",
)
"""Folders with one technique per module. The technique's class has the name of the module in CamelCase,
sometimes followed by the folder's name: `precision/auto` has the class AutoPrecision."""
PUBLIC = {
    "ExactGradient": "lightning_eff.microbatching.fabric",
    "FSDP2Fabric": "lightning_eff.strategy.fsdp2",
    "Stage": "lightning_eff.core.model_surgery",
    "TritonLinear": "lightning_eff.kernels.linear",
    "ZeroFabric": "lightning_eff.strategy.deepspeed_zero",
    "adapt": "lightning_eff.callbacks.peft_adapter",
    "apply": "lightning_eff.core.model_surgery",
    "compare": "lightning_eff.comparison.modules",
    "comparison_table": "lightning_eff.comparison.result_table",
    "compile_in_place": "lightning_eff.callbacks.torch_compile",
    "explain_tiles": "lightning_eff.kernels.tiles",
    "gemm": "lightning_eff.kernels.matmul",
    "linear_cross_entropy": "lightning_eff.kernels.cross_entropy",
    "linear_kl": "lightning_eff.kernels.cross_entropy",
    "predict": "lightning_eff.prediction.predict",
    "predict_step": "lightning_eff.prediction.predict",
    "recompute": "lightning_eff.callbacks.gradient_checkpointing",
    "register": "lightning_eff.config.recipes",
    "release": "lightning_eff.callbacks.empty_cache",
    "resumable": "lightning_eff.callbacks.exact_resume",
    "step_context": "lightning_eff.precision.auto",
    "swap": "lightning_eff.callbacks.triton_gemm",
    "tile_convs": "lightning_eff.callbacks.tiled_conv",
    "tile_loss": "lightning_eff.callbacks.tiled_loss",
    "tile_mlps": "lightning_eff.callbacks.tiled_mlp",
    "to_float8": "lightning_eff.precision.float8",
    "token_logprobs": "lightning_eff.kernels.cross_entropy",
}
"""The module of each public name, except for techniques. A technique's class of the same name has
precedence."""


@functools.cache
def public_names() -> dict[str, str]:
    """Return the module of each public name; the files of techniques are read, but not imported."""
    found = dict(PUBLIC)
    for folder in TECHNIQUE_FOLDERS:
        for file in sorted((Path(__file__).parent / folder).glob("[a-z]*.py")):
            # A file may define helper classes too, so compare each class with the file's name.
            names = re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            promised = [
                name for name in names if name.lower() in (file.stem.replace("_", ""), f"{file.stem}{folder}")
            ]
            found |= dict.fromkeys(promised, f"{__name__}.{folder}.{file.stem}")
    return found


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `import *`
        return list(public_names())
    module_name = public_names().get(name)
    if module_name is None:
        # Imported only for an error, to keep `import lightning_eff` fast.
        import difflib

        close = difflib.get_close_matches(name, public_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(module_name), name)


def __dir__() -> list[str]:
    return ["__version__", *public_names()]
