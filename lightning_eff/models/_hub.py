"""What a name stands for: its configuration, its class in transformers, files that may be read.

Nothing here runs what lies beside a configuration, and nothing reads weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_config(name: str, revision: str | None) -> Any:
    """Return the configuration of a hub name or folder.

    Raises:
        ValueError: There is none, or it needs code of its own.
        ModuleNotFoundError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        text = f"name={name!r} is loaded by transformers: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(text) from error
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        reason = "holds an adapter: name the model that it belongs to" if adapter else "has no config.json"
        text = f"name={name!r} {reason}"
        raise ValueError(text)
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(why_not(name, str(error))) from error


def why_not(name: str, said: str) -> str:
    """Return why a model cannot be loaded, from what transformers said, with what to do."""
    if "trust_remote_code" in said:
        reason = (
            "brings code of its own, which is never run here: name a model that transformers has built in"
        )
        return f"name={name!r} {reason}"
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}
    if offline and not Path(name).expanduser().is_dir():
        return (
            f"name={name!r} is no folder here nor in the cache, and HF_HUB_OFFLINE forbids to ask for it\n"
            "  try: a folder, or HF_HUB_OFFLINE=0"
        )
    first = next(iter(said.strip().splitlines()), "")
    return f"name={name!r} cannot be loaded: {first}\n  try: a folder with config.json and *.safetensors"


def class_of(name: str, config: Any) -> type:
    """Return transformers' own class of causal language models for a configuration.

    Raises:
        ValueError: It has none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text = (
            f"name={name!r} is a {config.model_type}: transformers has no causal language model of this kind"
        )
        raise ValueError(text)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def check_weights(name: str, config: Any) -> None:
    """Look at what kind of weights a name has, as far as its files lie in a folder.

    Raises:
        ValueError: They are quantized, pickles, or not there; or the folder holds an adapter too.
    """
    if getattr(config, "quantization_config", None) is not None:
        text = f"name={name!r} has quantized weights: name the model that they were made of"
        raise ValueError(text)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").is_file():
        text = f"name={name!r} holds an adapter beside its weights, which would be loaded unasked: move it"
        raise ValueError(text)
    weights = list(folder.glob("*.safetensors"))
    odd = [file.name for file in weights if not file.is_file()]
    if odd:  # a FIFO would wait for a writer, a device need not end
        text = f"name={name!r} has weights in what is no regular file: {odd[0]}"
        raise ValueError(text)
    if weights:
        return
    pickles = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if pickles:
        text = (
            f"name={name!r} has weights as a pickle ({pickles[0]}), which may run code and is not read\n"
            "  try: convert it where you trust it: model.save_pretrained(folder) writes safetensors"
        )
        raise ValueError(text)
    text = f"name={name!r} has no *.safetensors\n  try: model.pretrained=false for new weights"
    raise ValueError(text)


def choose_attention(asked: str, owner: Any) -> str:
    """Return the implementation that "auto" stands for: sdpa, or eager in a model without it."""
    if asked != "auto":
        return asked
    return "sdpa" if owner._supports_sdpa else "eager"  # noqa: SLF001 - transformers has no public word for it
