"""What `hf_causal_lm` reads of a model before its weights: configuration, class in transformers, file names.

Nothing here executes code that lies next to a configuration, and nothing reads weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_config(name: str, revision: str | None) -> Any:
    """Return the configuration of a causal language model, by hub name or folder.

    Raises:
        ValueError: It cannot be loaded, needs code of its own, or is of another kind of model.
        ModuleNotFoundError: transformers is not installed.
    """
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"name={name!r} needs transformers: pip install 'lightning-eff[hf]'"
        ) from error
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        reason = "holds an adapter, which transformers would load too: name the model that it belongs to"
        raise ValueError(f"name={name!r} {reason}")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(load_failure_message(name, str(error))) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = config.model_type
        raise ValueError(f"name={name!r} is a {kind}: transformers has no causal language model of this type")
    return config


def load_failure_message(name: str, upstream_message: str) -> str:
    """Return why a model cannot be loaded and what to do, from the error message of transformers."""
    if "trust_remote_code" in upstream_message:
        reason = "needs code of its own, which is never executed: name a model that transformers has built in"
        return f"name={name!r} {reason}"
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}
    if offline and not Path(name).expanduser().is_dir():
        return (
            f"name={name!r} is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids downloads\n"
            "  try: a folder, or HF_HUB_OFFLINE=0"
        )
    first = next(iter(upstream_message.strip().splitlines()), "")
    return f"name={name!r} cannot be loaded: {first}\n  try: a folder with config.json and *.safetensors"


def check_weights(name: str, config: Any) -> None:
    """Check the kind of weights of a model, as far as its files lie in a local folder.

    Raises:
        ValueError: They are quantized, pickles, or missing.
    """
    folder = Path(name).expanduser()
    weights = list(folder.glob("*.safetensors"))
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    # Not read: a FIFO would wait for a writer, and a device may be endless.
    irregular = [file.name for file in weights if not file.is_file()]
    problem = ""
    if getattr(config, "quantization_config", None) is not None:
        problem = "has quantized weights: name the model that they were quantized from"
    elif irregular:
        problem = f"has weights in what is no regular file: {irregular[0]}"
    elif folder.is_dir() and not weights:
        problem = "has no *.safetensors\n  try: model.pretrained=false for random weights"
        if pickles:
            problem = (
                f"has weights as a pickle ({pickles[0]}), which may execute code and is not read\n"
                "  try: convert it where you trust it: model.save_pretrained(folder) writes safetensors"
            )
    if problem:
        raise ValueError(f"name={name!r} {problem}")
