"""What a checkpoint of a model with adapters holds, and what it must hold to be loaded.

It holds what cannot be had elsewhere: trained parameters (adapters, modules that are trained themselves, the
biases that a method trains) and buffers; in place of the frozen base there is its fingerprint. The base comes
from where the model had it before. Nothing is assigned before all of this is known to fit: the method and its
numbers, every key and shape, the base.

A LightningModule with adapters knows this itself, from its hooks for saving and loading, so that saves of
weights alone and saves after the end of a run are like all others. Why not a callback's hooks: Lightning
leaves them out where weights alone are saved, and calls them after it has loaded. Why not
`strict_loading=False`: it takes the adapter of another model and leaves ours at its initial values. For
Fabric, or a loop of one's own, `strip` and `load` do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_eff.adapters import inject as adapters
from lightning_eff.adapters.base_fingerprint import Fingerprint, named, of_quantized, split
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import is_sharded, full_shape

KEY = "peft_adapter"
"""Under which a checkpoint keeps the method and the base's fingerprint."""
FREE = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("exclude_modules", "feedforward_modules", "layers_pattern", "layers_to_transform", "modules_to_save"),
    *("target_modules", "target_parameters"),  # the keys say which layers there are
    *("rank_pattern", "total_step", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight"),
    *("ephemeral_gpu_offload", "lora_dropout", "module_dropout", "rank_dropout", "runtime_config"),
}
"""Fields of a method's config that may be others when training goes on; initial values may be too."""
PLAIN = (str, int, float, bool)
TEXT_WITHOUT = (
    "it holds no adapter, only the model\n"
    "  try: base_checkpoint=PATH of PeftAdapter in place of ckpt_path=PATH, to train an adapter on it"
)


def settings(model: nn.Module) -> dict[str, Any]:
    """Return what of a method's config decides what its adapters compute, in plain types."""
    config = adapters.config_of(model)
    if config is None:
        return {}
    fields = {
        key: value
        for key, value in config.to_dict().items()
        if key not in FREE and not key.startswith("init") and isinstance(value, (*PLAIN, dict, list))
    }
    return {key: _plain(value) for key, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(getattr(value, "value", value)) if isinstance(value, str) else value


def strip(
    model: nn.Module, checkpoint: dict[str, Any], fingerprint: Fingerprint, *, save_base: bool = False
) -> None:
    """Take the frozen base out of a checkpoint, and put its fingerprint in.

    Args:
        model: With adapters.
        checkpoint: Has the model's state under `state_dict`.
        fingerprint: Remembers what it has read; one for each model.
        save_base: Leave the base in.

    Raises:
        CheckpointError: There is no adapter to save: its tensors are empty, or merged into the base.
    """
    base, rest = split(model)
    trained = _trained(model)
    whole: Mapping[str, Any] = checkpoint["state_dict"]
    empty = [name for name in trained if name in rest and not whole[name].numel()]
    merged = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer) and m.merged]
    if empty or not trained:
        text = f"the adapter is not saved: it is empty, or in parts elsewhere ({named(empty)})"
        raise CheckpointError(text)
    if merged:
        text = f"the adapter is not saved: it is merged into the base ({named(merged)})\n  try: unmerge it"
        raise CheckpointError(text)
    if not save_base:
        checkpoint["state_dict"] = {name: value for name, value in whole.items() if name not in base}
    record = None if save_base else fingerprint.record(model)
    checkpoint[KEY] = {"settings": settings(model), "base": record}


def check(
    model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint, *, strict: bool = True
) -> set[str]:
    """Hold a checkpoint against a model with adapters; nothing is assigned.

    Args:
        model: With adapters.
        checkpoint: What was read from a file, so it may be anything.
        fingerprint: Remembers what it has read; one for each model.
        strict: Without, only what is trained must be there.

    Returns:
        The names of the tensors that the checkpoint leaves to the model.

    Raises:
        CheckpointError: Method, keys, shapes or base do not fit; the first are named.
    """
    state = _state_of(checkpoint)
    record = checkpoint.get(KEY)
    kept: dict[str, Any] = record if isinstance(record, dict) else {}
    base, rest = split(model)
    trained = _trained(model)
    _check_settings(settings(model), kept.get("settings"))
    alone = kept.get("base") is not None
    low = () if alone else of_quantized(model)  # which see themselves what they can take
    expected = {n: value for n, value in (rest if alone else base | rest).items() if not n.startswith(low)}
    if not set(trained) & state.keys():
        raise CheckpointError(TEXT_WITHOUT if not alone else _differing(trained, state, ()))
    missing = [name for name in (expected if strict else trained) if name not in state]
    unexpected = [name for name in state if name not in expected and not name.startswith(low)]
    unexpected = unexpected if strict or alone else []
    if missing or unexpected:
        raise CheckpointError(_differing(missing, unexpected, ()))
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(full_shape(value))}"
        for name, value in expected.items()
        if name in state and isinstance(value, Tensor) and state[name].shape != full_shape(value)
    ]
    if shapes:
        raise CheckpointError(_differing((), (), shapes))
    if not alone:
        return set()
    fingerprint.check(model, kept["base"])
    return set(base)


def load(model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint | None = None) -> None:
    """Load an adapter, or a whole model with adapters, into a model that has its base and fresh adapters.

    Args:
        model: With adapters.
        checkpoint: What was read from a file.
        fingerprint: Remembers what it has read; None for a new one.

    Raises:
        CheckpointError: It does not fit; nothing was assigned.
    """
    left = check(model, checkpoint, fingerprint or Fingerprint())
    handle = model.register_load_state_dict_post_hook(lambda _, keys: _allow(keys.missing_keys, left))
    try:
        model.load_state_dict(checkpoint["state_dict"])
    finally:
        handle.remove()


def _allow(missing: list[str], left: Iterable[str]) -> None:
    missing[:] = [name for name in missing if name not in left]


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _state_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        text = "it holds no weights of a module"
        raise CheckpointError(text)
    empty = [name for name, value in state.items() if not value.numel()]
    if empty:
        text = f"it holds empty tensors: {named(empty)}"
        raise CheckpointError(text)
    return state


def _check_settings(ours: Mapping[str, Any], theirs: Any) -> None:
    known: Mapping[str, Any] = theirs if isinstance(theirs, Mapping) else {}
    others = [key for key, value in ours.items() if key in known and known[key] != value]
    first = "peft_type" if "peft_type" in others else next(iter(others), "")
    if first:
        there, here = (f"{str(each[first])[:60]!a}" for each in (known, ours))
        name = "method" if first == "peft_type" else f"options.{first}"
        remedy = f"callbacks.peft_adapter.{name}={str(known[first])[:60].lower()}"
        text = f"it holds an adapter with {name} {there}, and here it is {here}\n  try: {remedy!a}"
        raise CheckpointError(text)


def _differing(missing: Iterable[str], unexpected: Iterable[str], shapes: Iterable[str]) -> str:
    lists = {"missing": missing, "not of this model": unexpected, "of another shape": shapes}
    parts = [f"{what}: {named(each)}" for what, each in lists.items() if list(each)]
    return "it holds other tensors than this model with its adapter has; " + "; ".join(parts)


class KeepsAdapter:
    """Stands behind a LightningModule's hooks for checkpoints, as long as it has adapters.

    Args:
        module: With adapters.
        save_base: Save whole checkpoints.
    """

    def __init__(self, module: pl.LightningModule, *, save_base: bool) -> None:
        self.module = module
        self.save_base = save_base
        self.fingerprint = Fingerprint()
        self.num_saved = 0
        self._saves = module.on_save_checkpoint
        self._loads = module.on_load_checkpoint
        self._left: set[str] = set()
        module.on_save_checkpoint = self.on_save_checkpoint
        module.on_load_checkpoint = self.on_load_checkpoint
        module.register_load_state_dict_post_hook(self.after_load)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the module's own hook called, then take the base out.

        Other ranks write nothing, and help only where each has a part of the base, to read it.
        """
        self._saves(checkpoint)
        if self.module.global_rank == 0 or any(is_sharded(each) for each in self.module.parameters()):
            strip(self.module, checkpoint, self.fingerprint, save_base=self.save_base)
            self.num_saved += 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the module's own hook called, then refuse what does not fit, before Lightning loads it."""
        self._loads(checkpoint)
        try:
            strict = self.module.strict_loading
            self._left = check(self.module, checkpoint, self.fingerprint, strict=strict)
        except CheckpointError as error:
            path = getattr(self.module.trainer, "ckpt_path", None)
            text = f"checkpoint {path} is not loaded: {error}"
            raise CheckpointError(text) from error

    def after_load(self, _: nn.Module, keys: Any) -> None:
        """Let the load that was checked leave out the base; PyTorch stays strict about all else."""
        _allow(keys.missing_keys, self._left)
        self._left = set()


def keep(module: pl.LightningModule, *, save_base: bool) -> KeepsAdapter:
    """Have a module with adapters save and load them as such, in this run and after it."""
    there = getattr(module.__dict__.get("on_save_checkpoint"), "__self__", None)
    if not isinstance(there, KeepsAdapter):
        return KeepsAdapter(module, save_base=save_base)
    there.save_base = save_base
    return there


@torch.no_grad()
def load_weights(model: nn.Module, state: Mapping[str, Any]) -> int:
    """Load the weights of a model without adapters, wholly or not at all; return how many tensors.

    Raises:
        CheckpointError: Keys or shapes do not fit; the first are named.
    """
    weights = _state_of({"state_dict": state})
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in weights if name in own}
    missing = [name for name in own if name not in weights and id(own[name]) not in given]
    unexpected = [name for name in weights if name not in own]
    shapes = [
        f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    if missing or unexpected or shapes:
        text = _differing(missing, unexpected, shapes).replace("this model with its adapter", "this model")
        raise CheckpointError(text)
    _refuse_parted(own, weights)
    model.load_state_dict({name: weights[name] for name in weights}, strict=False)
    return len(weights)


def _refuse_parted(own: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse several values for what is one parameter under several names here: the last would be taken."""
    groups: dict[int, list[str]] = {}
    for name in weights:
        groups.setdefault(id(own[name]), []).append(name)
    for first, *others in groups.values():
        parted = [name for name in others if not torch.equal(weights[name], weights[first])]
        if parted:
            text = (
                f"it holds several values of what is one weight in this model: {named([first, *parted])}\n"
                "  try: a model that does not tie them: tie_word_embeddings=false"
            )
            raise CheckpointError(text)
