"""What a checkpoint of a model with adapters holds, and what it must hold to be loaded.

It holds what cannot be had elsewhere: trained parameters (adapters, `modules_to_save`, biases) and buffers,
and in place of the frozen base its fingerprint. The base comes from where the model got it before. Nothing is
assigned before all of it fits: the method and its config, each key and shape, the base.

A LightningModule with adapters does this in its own checkpoint hooks, so that it holds for weights-only saves
and for saves after the run too. Why not a callback's hooks: Lightning omits them in weights-only saves, and
calls them after it has loaded. Why not `strict_loading=False`: it accepts another model's adapter and leaves
this one's at its initial values. For Fabric, or a loop of your own: `strip_base` and `load_adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_eff.adapters import CHECKPOINT_KEY
from lightning_eff.adapters.base_fingerprint import Fingerprint, format_names, split_state
from lightning_eff.adapters.inject import peft_config_of
from lightning_eff.adapters.methods import settings_of
from lightning_eff.adapters.quantized import quantized_prefixes
from lightning_eff.core.errors import CheckpointError, Remedy
from lightning_eff.core.shards import full_shape, is_sharded

NO_ADAPTER = (
    "it holds no adapter, only the model\n"
    "  try: base_checkpoint=PATH of PeftAdapter in place of ckpt_path=PATH, to train an adapter on it"
)


def strip_base(
    model: nn.Module, checkpoint: dict[str, Any], fingerprint: Fingerprint, *, save_base: bool = False
) -> None:
    """Remove the frozen base from a checkpoint, in place, and add its fingerprint.

    Raises:
        CheckpointError: The adapter cannot be saved: its tensors are empty, or merged into the base.
    """
    base, rest = split_state(model)
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    state: Mapping[str, Any] = checkpoint["state_dict"]
    empty = [name for name in trained if name in rest and not state[name].numel()]
    merged = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer) and m.merged]
    if empty or not trained:
        raise CheckpointError(
            f"the adapter is not saved: its tensors are empty or on other ranks ({format_names(empty)})"
        )
    if merged:
        names = format_names(merged)
        raise CheckpointError(
            f"the adapter is not saved: it is merged into the base ({names})\n  try: unmerge it"
        )
    if not save_base:
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name not in base}
    record = None if save_base else fingerprint.record(model)
    checkpoint[CHECKPOINT_KEY] = {"settings": settings_of(peft_config_of(model)), "base": record}


def check_adapter(
    model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint, *, strict: bool = True
) -> set[str]:
    """Compare a checkpoint with a model with adapters; nothing is assigned.

    Args:
        model: With adapters.
        checkpoint: Read from a file, so it may be anything.
        fingerprint: Caches digests; one for each model.
        strict: False requires only what is trained.

    Returns:
        The names of the tensors that the checkpoint does not hold: those of the base, or none.

    Raises:
        CheckpointError: Method, keys, shapes or base do not fit; the first are named.
    """
    state, stamp = _checked_state(checkpoint), checkpoint.get(CHECKPOINT_KEY)
    stamp = stamp if isinstance(stamp, dict) else {}
    _check_settings(settings_of(peft_config_of(model)), stamp.get("settings"))
    base, rest = split_state(model)
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    has_base = stamp.get("base") is None
    if has_base and not any(name in state for name in trained):
        raise CheckpointError(NO_ADAPTER)
    # A quantized layer checks in its own `_load_from_state_dict` which formats it can load.
    unchecked = quantized_prefixes(model) if has_base else ()
    state_here = base | rest if has_base else rest
    expected = {name: value for name, value in state_here.items() if not name.startswith(unchecked)}
    missing = [name for name in (expected if strict else trained) if name not in state]
    unexpected = [name for name in state if name not in expected and not name.startswith(unchecked)]
    unexpected = unexpected if strict or not has_base else []
    _check_tensors(state, expected, missing=missing, unexpected=unexpected)
    if not has_base:
        fingerprint.check(model, stamp["base"])
    return set() if has_base else set(base)


def _check_settings(here: Mapping[str, Any], saved: Any) -> None:
    """Reject an adapter whose config computes something else; `saved` is from a file."""
    saved = saved if isinstance(saved, Mapping) else {}
    different = [key for key, value in here.items() if key in saved and saved[key] != value]
    if different:
        key = "peft_type" if "peft_type" in different else different[0]
        name = "method" if key == "peft_type" else f"options.{key}"
        was, now = str(saved[key])[:60], str(here[key])[:60]
        text = f"it holds an adapter with {name} {was!a}, and this run has {now!a}"
        value = str(saved[key]).lower() if key == "peft_type" else saved[key]
        # A remedy only of a value that is safe to paste: it is from a file.
        if isinstance(value, (int, float)) or (isinstance(value, str) and value.isidentifier()):
            argument = f"method={value!r}" if name == "method" else f"options={{{key!r}: {value!r}}}"
            typed = value if isinstance(value, str) else str(value).lower()
            text += f"\n  try: {Remedy(f'callbacks.peft_adapter.{name}={typed}', f'PeftAdapter({argument})')}"
        raise CheckpointError(text)


def load_adapter(
    model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint | None = None
) -> None:
    """Load an adapter, or a full model with adapters, into a model that has its base and new adapters.

    Raises:
        CheckpointError: It does not fit; nothing was assigned.
    """
    check_adapter(model, checkpoint, fingerprint or Fingerprint())
    model.load_state_dict(
        checkpoint["state_dict"], strict=False
    )  # the base may be missing; all else is checked


@torch.no_grad()
def load_base_weights(model: nn.Module, state: Mapping[str, Any]) -> int:
    """Load the weights of a model without adapters, all or none; return the number of tensors.

    Raises:
        CheckpointError: Keys or shapes do not fit; the first are named.
    """
    weights = _checked_state({"state_dict": state})
    own = model.state_dict(keep_vars=True)
    loaded = {id(own[name]) for name in weights if name in own}  # a tied weight may be under one of its names
    _check_tensors(
        weights,
        own,
        missing=[name for name in own if name not in weights and id(own[name]) not in loaded],
        unexpected=[name for name in weights if name not in own],
        model="this model",
    )
    names_by_tensor: dict[int, list[str]] = {}
    for name in weights:
        names_by_tensor.setdefault(id(own[name]), []).append(name)
    for first, *others in names_by_tensor.values():
        # load_state_dict would assign one after the other, and the last would stay
        different = [name for name in others if not torch.equal(weights[name], weights[first])]
        if different:
            raise CheckpointError(
                f"it holds different values for one tied weight: {format_names([first, *different])}\n"
                "  try: a model that does not tie them: tie_word_embeddings=false"
            )
    model.load_state_dict(dict(weights), strict=False)
    return len(weights)


def _checked_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError("it holds no weights of a module")
    empty = [name for name, value in state.items() if not value.numel()]
    if empty:
        raise CheckpointError(f"it holds empty tensors: {format_names(empty)}")
    return state


def _check_tensors(
    state: Mapping[str, Tensor],
    expected: Mapping[str, Any],
    *,
    missing: list[str],
    unexpected: list[str],
    model: str = "this model with its adapter",
) -> None:
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(full_shape(value))}"
        for name, value in expected.items()
        if name in state and isinstance(value, Tensor) and state[name].shape != full_shape(value)
    ]
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    parts = [f"{title}: {format_names(names)}" for title, names in lists.items() if names]
    if parts:
        raise CheckpointError(f"its tensors differ from those of {model}; {'; '.join(parts)}")


class AdapterCheckpointHooks:
    """Extend a LightningModule's checkpoint hooks, from now on, for as long as it has adapters."""

    @classmethod
    def attach(cls, module: pl.LightningModule) -> AdapterCheckpointHooks:
        """Return the hooks that a module has, or new ones."""
        attached = getattr(module.__dict__.get("on_save_checkpoint"), "__self__", None)
        return attached if isinstance(attached, cls) else cls(module)

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.save_base = False
        self.fingerprint = Fingerprint()
        self.num_saved = 0
        self._own_save = module.on_save_checkpoint
        self._own_load = module.on_load_checkpoint
        self._absent: set[str] = set()
        module.on_save_checkpoint = self.on_save_checkpoint
        module.on_load_checkpoint = self.on_load_checkpoint
        module.register_load_state_dict_post_hook(self.after_load)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the module's own hook, then remove the base.

        Only rank 0 writes; where parameters are sharded, all ranks join in, since reading the base for its
        fingerprint gathers them.
        """
        self._own_save(checkpoint)
        if self.module.global_rank == 0 or any(is_sharded(p) for p in self.module.parameters()):
            strip_base(self.module, checkpoint, self.fingerprint, save_base=self.save_base)
            self.num_saved += 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the module's own hook, then reject what does not fit, before Lightning loads it."""
        self._own_load(checkpoint)
        try:
            strict = self.module.strict_loading
            self._absent = check_adapter(self.module, checkpoint, self.fingerprint, strict=strict)
        except CheckpointError as error:
            path = getattr(self.module.trainer, "ckpt_path", None)
            raise CheckpointError(f"checkpoint {path} is not loaded: {error}") from error

    def after_load(self, _: nn.Module, keys: Any) -> None:
        """Accept that the base is missing in the load that was checked; PyTorch stays strict otherwise."""
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in self._absent]
        self._absent = set()
