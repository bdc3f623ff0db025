"""The content of a checkpoint with adapters, and the checks before such a checkpoint is loaded.

The checkpoint contains the trained parameters (adapters, `modules_to_save`, biases) and the buffers. Instead
of the frozen base, the checkpoint contains a fingerprint; the base is loaded from its original source.
Tensors are assigned only if everything fits: the method, its config, all keys and shapes, and the base.

An adapter works only on the base that it was trained on. Keys and shapes do not identify a base, because all
models of an architecture have the same keys and shapes. So the fingerprint lists each frozen tensor by name,
with its dtype, its shape and the first 64 bits of its SHA-256. The fingerprint is the same on each device,
and an error can name the tensors that differ. The fingerprint excludes buffers, because training may change
them. Persistent buffers are saved with the adapter. If training changes a frozen tensor, for example a
prototype, no other source has this base. So the checkpoint then contains the base too.

`callbacks/peft_adapter` adds these functions to the LightningModule's own checkpoint hooks. Lightning also
calls these hooks for weights-only saves and for saves after the run. Why not a callback's hooks: Lightning
calls a callback's hooks only after loading, and never for weights-only saves. Why not `strict_loading=False`:
this setting accepts another model's adapter, and leaves this model's adapter at its initial values. Fabric
and custom loops call `strip_base` and `load_adapter`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_eff.adapters import CHECKPOINT_KEY
from lightning_eff.adapters.inject import peft_config_of, settings_of, wrapped_layers
from lightning_eff.adapters.layers import plain_name, quantized_prefixes
from lightning_eff.core.errors import CheckpointError, Remedy
from lightning_eff.core.shards import full_shape, full_tensor, is_sharded

NO_ADAPTER = (
    "it holds no adapter, only the model\n"
    "  try: base_checkpoint=PATH of PeftAdapter instead of ckpt_path=PATH, to train an adapter on it"
)
NUM_THREADS = 8
NUM_DIGEST_CHARACTERS = 16
NUM_PROBED = 64
MAX_NAMES = 3
FLOAT_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def split_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a module's state into the frozen base, and the rest, which is trained or may change.

    The base consists of all frozen parameters and the full state of quantized layers. The rest includes
    persistent buffers, because running statistics change in frozen modules too. The rest also includes an
    adapter's own frozen tensors, which may be random.

    Example:
        >>> layer = nn.BatchNorm1d(2).requires_grad_(False)
        >>> [list(state) for state in split_state(layer)]
        [['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked']]
    """
    wrappers = [f"{name}." for name in wrapped_layers(module)]
    frozen: set[str] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # A frozen parameter outside all wrappers belongs to the base.
        inner = next((name.removeprefix(w) for w in wrappers if name.startswith(w)), "base_layer")
        if not parameter.requires_grad and {"base_layer", "original_module"} & {*inner.split(".")}:
            frozen.add(name)
    quantized = quantized_prefixes(module)
    base, rest = dict[str, Any](), dict[str, Any]()
    for name, value in module.state_dict(keep_vars=True).items():
        state = base if name in frozen or name.startswith(quantized) else rest
        state[name] = value
    return base, rest


def format_names(names: Iterable[str]) -> str:
    """Return the first names, shortened and escaped, and the number of further names.

    Example:
        >>> format_names(["a", "b", "c", "d"]), format_names(["a"])
        ("'a', 'b', 'c' and 1 more", "'a'")
    """
    known = list(names)
    shown = ", ".join(f"{name[:120]!a}" for name in known[:MAX_NAMES])
    return f"{shown} and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else shown or "none"


class Fingerprint:
    """Computes fingerprints of a module's frozen tensors, and caches digests by tensor and version.

    A digest is computed again only if PyTorch has counted an in-place change of the tensor, or if one of a
    few values has changed. PyTorch does not count changes through `.data`.

    Args:
        exact: False accepts different values in quantized layers if all other frozen tensors are equal,
            because quantization may round differently on another device.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self.others: list[str] = []
        """Names of the tensors that differed and were accepted."""
        self.start: dict[str, str] | None = None
        """The first fingerprint: of a loaded checkpoint, or from before training."""
        self._digests_by_name: dict[str, tuple[Tensor, int, torch.dtype, list[Any], str]] = {}

    def record(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's fingerprint in plain types, for a checkpoint; the first call sets `start`."""
        tensors = self._hash(module, self.start or {})
        self.start = self.start or tensors
        return {"tensors": tensors}

    def changed(self, tensors: Mapping[str, str]) -> list[str]:
        """Return the names of frozen tensors that differ from `start`."""
        start = self.start or {}
        return sorted(name for name in {*tensors, *start} if tensors.get(name) != start.get(name))

    def check(self, module: nn.Module, record: Any) -> None:
        """Compare a module's frozen tensors with a checkpoint's fingerprint; `record` may be any object.

        Raises:
            CheckpointError: The base differs; the error names the first tensors that differ.
        """
        expected: Any = record.get("tensors") if isinstance(record, dict) else None
        texts = [text for pair in expected.items() for text in pair] if isinstance(expected, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise CheckpointError("it holds an adapter without the fingerprint of its base")
        tensors = self._hash(module, expected)
        names = {*tensors, *expected}
        others = sorted(name for name in names if tensors.get(name) != expected.get(name))
        quantized = tuple(f"{plain_name(prefix[:-1])}." for prefix in quantized_prefixes(module))
        # Only frozen tensors outside of quantized layers can prove that the base is the same.
        if not self.exact and any(not name.startswith(quantized) for name in tensors):
            # Rounding can change values in quantized layers, but not their layout.
            layouts = [
                {n: known.get(n, "").partition(" ")[0] for n in others} for known in (tensors, expected)
            ]
            self.others = [n for n in others if n.startswith(quantized) and layouts[0][n] == layouts[1][n]]
            others = [name for name in others if name not in self.others]
        if others:
            # `others` includes tensors that exist only in the checkpoint or only in the model.
            differ = f"{format_names(others)} of {len(names)} frozen tensors differ"
            base = Remedy(
                "callbacks.peft_adapter.base_checkpoint=PATH of its base, or its model.name and seed",
                "PeftAdapter(base_checkpoint=PATH of its base), or the model's own name and seed",
            )
            raise CheckpointError(f"it holds an adapter for another base: {differ}\n  try: {base}")
        self.start = expected

    def _hash(self, module: nn.Module, recorded: Mapping[str, str]) -> dict[str, str]:
        """Return `dtype[shape]` and the start of the digest of each frozen tensor, by plain name.

        A floating-point tensor with more than 8 bits is first converted to the recorded dtype, because a
        `-true` precision converts the model only after the checkpoint is restored.
        """
        base = {name: value for name, value in split_state(module)[0].items() if isinstance(value, Tensor)}
        # A quantized layer's state has new tensors at each call, so the cache uses the parameters instead.
        parameters = base | dict(module.named_parameters(remove_duplicate=False))

        def layout_and_digest(name: str) -> str:
            value = base[name]
            is_wide = value.is_floating_point() and value.dtype.itemsize > 1
            # A base that was saved in bfloat16 may be loaded in float32.
            saved = recorded.get(plain_name(name), "").partition("[")[0] if is_wide else ""
            dtype = FLOAT_DTYPES.get(saved, value.dtype)
            shape = ",".join(str(n) for n in full_shape(value))
            digest = self._digest(name, value, parameters[name], dtype)[:NUM_DIGEST_CHARACTERS]
            return f"{str(dtype).removeprefix('torch.')}[{shape}] {digest}"

        names = sorted(base)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            # Gathering a sharded tensor is a collective, so all ranks must gather in the same order.
            each = map if any(is_sharded(value) for value in base.values()) else pool.map
            texts = list(each(layout_and_digest, names))
        return {plain_name(name): text for name, text in zip(names, texts, strict=True)}

    def _digest(self, name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> str:
        """Return the SHA-256 of a tensor in `dtype`, from the cache if the parameter is unchanged."""
        version = parameter._version  # noqa: SLF001 - torch 2.13's count of in-place changes
        cached = self._digests_by_name.get(name)
        is_plain = type(parameter) in (Tensor, nn.Parameter)
        few = (
            parameter.detach().flatten()[:: parameter.numel() // NUM_PROBED + 1].tolist() if is_plain else []
        )
        if cached is not None and cached[0] is parameter and cached[1:4] == (version, dtype, few):
            return cached[4]
        # Hash the bytes of all parts, in the order in which a wrapper subclass lists them.
        digest, parts = hashlib.sha256(), [full_tensor(value).detach().to(dtype)]
        while parts:
            part: Any = parts.pop(0)
            if hasattr(part, "__tensor_flatten__"):  # a wrapper subclass
                parts = [*(getattr(part, key) for key in part.__tensor_flatten__()[0]), *parts]
                continue
            flat = part.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        self._digests_by_name[name] = (parameter, version, dtype, few, digest.hexdigest())
        return digest.hexdigest()


def strip_base(
    model: nn.Module, checkpoint: dict[str, Any], fingerprint: Fingerprint, *, save_base: bool = False
) -> None:
    """In a checkpoint dictionary, replace the frozen base by its fingerprint.

    The base stays if a frozen tensor has changed since the first call of `fingerprint.record`, for example a
    teacher's weights: no other source has this base.

    Raises:
        CheckpointError: The adapter cannot be saved, because its tensors are empty or merged into the base.
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
    # A merged base has a different fingerprint, so a model without the adapter could not load the checkpoint.
    if merged:
        names = format_names(merged)
        raise CheckpointError(
            f"the adapter is not saved: it is merged into the base ({names})\n  try: unmerge it"
        )
    record = None if save_base else fingerprint.record(model)
    if record is not None and fingerprint.changed(record["tensors"]):
        record = None
    if record is not None:
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name not in base}
    checkpoint[CHECKPOINT_KEY] = {"settings": settings_of(peft_config_of(model)), "base": record}


def check_adapter(
    model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint, *, strict: bool = True
) -> set[str]:
    """Compare a checkpoint with a model that has adapters, without assigning tensors.

    Args:
        model: The model, with adapters.
        checkpoint: The content of a file, which may be any object.
        fingerprint: Caches digests; use one object per model.
        strict: If False, only the trained tensors must be present.

    Returns:
        The names of the base's tensors if the checkpoint lacks the base, else an empty set.

    Raises:
        CheckpointError: Method, keys, shapes or base do not fit; the error names the first differences.
    """
    state, stamp = _checked_state(checkpoint), checkpoint.get(CHECKPOINT_KEY)
    stamp = stamp if isinstance(stamp, dict) else {}
    _check_settings(settings_of(peft_config_of(model)), stamp.get("settings"))
    base, rest = split_state(model)
    trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    # Without a fingerprint, the checkpoint must contain the base itself.
    has_base = stamp.get("base") is None
    if has_base and not any(name in state for name in trained):
        raise CheckpointError(NO_ADAPTER)
    # A quantized layer's own `_load_from_state_dict` checks which formats it can load.
    unchecked = quantized_prefixes(model) if has_base else ()
    state_here = base | rest if has_base else rest
    expected = {name: value for name, value in state_here.items() if not name.startswith(unchecked)}
    missing = [name for name in (expected if strict else trained) if name not in state]
    unexpected = [name for name in state if name not in expected and not name.startswith(unchecked)]
    # As in PyTorch, a non-strict load ignores unexpected tensors. But an adapter without its base must fit.
    unexpected = unexpected if strict or not has_base else []
    _check_tensors(state, expected, missing=missing, unexpected=unexpected)
    if not has_base:
        fingerprint.check(model, stamp["base"])
    return set() if has_base else set(base)


def _check_settings(here: Mapping[str, Any], saved: Any) -> None:
    """Reject an adapter whose saved settings differ from this run's settings; `saved` may be any object."""
    saved = saved if isinstance(saved, Mapping) else {}
    different = [key for key, value in here.items() if key in saved and saved[key] != value]
    if not different:
        return
    key = "peft_type" if "peft_type" in different else different[0]
    name = "method" if key == "peft_type" else f"options.{key}"
    was, now = str(saved[key])[:60], str(here[key])[:60]
    text = f"it holds an adapter with {name} {was!a}, and this run has {now!a}"
    value = was.lower() if key == "peft_type" else saved[key]
    # The value is from a file, so show a remedy only if the value is safe to paste.
    if isinstance(value, (int, float)) or (isinstance(value, str) and value.isidentifier()):
        argument = f"method={value!r}" if name == "method" else f"options={{{key!r}: {value!r}}}"
        override = f"callbacks.peft_adapter.{name}={value if isinstance(value, str) else str(value).lower()}"
        text += f"\n  try: {Remedy(override, f'PeftAdapter({argument})')}"
    raise CheckpointError(text)


def load_adapter(
    model: nn.Module, checkpoint: Mapping[str, Any], fingerprint: Fingerprint | None = None
) -> None:
    """Load an adapter, or a full model with an adapter, into a model that has the base and new adapters.

    Raises:
        CheckpointError: The checkpoint does not fit the model; nothing has been assigned.
    """
    check_adapter(model, checkpoint, fingerprint or Fingerprint())
    # A strict load would reject a missing base; all other names have been checked.
    model.load_state_dict(checkpoint["state_dict"], strict=False)


@torch.no_grad()
def load_base_weights(model: nn.Module, state: Mapping[str, Any]) -> int:
    """Load the weights of a model without adapters, if all weights fit; return the number of tensors.

    Raises:
        CheckpointError: Keys or shapes do not fit; the error names the first differences.
    """
    weights = _checked_state({"state_dict": state})
    own = model.state_dict(keep_vars=True)
    # A file may list a tied weight under only one of its names.
    loaded = {id(own[name]) for name in weights if name in own}
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
        # `load_state_dict` would assign all values to the tied weight, and keep the last value.
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
    """Extends the checkpoint hooks of a LightningModule that has adapters."""

    @classmethod
    def attach(cls, module: pl.LightningModule) -> AdapterCheckpointHooks:
        """Return the hooks that the module already has, or attach new hooks."""
        attached = getattr(module.__dict__.get("on_save_checkpoint"), "__self__", None)
        return attached if isinstance(attached, cls) else cls(module)

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.save_base = self.is_full = False
        """Whether checkpoints have the base: by setting, or as it changed, or as in the loaded checkpoint."""
        self.fingerprint = Fingerprint()
        self.num_saved = 0
        # Bind the module's own hooks before they are replaced on the instance.
        self._own_save = module.on_save_checkpoint
        self._own_load = module.on_load_checkpoint
        self._absent: set[str] = set()
        module.on_save_checkpoint = self.on_save_checkpoint
        module.on_load_checkpoint = self.on_load_checkpoint
        module.register_load_state_dict_post_hook(self.after_load)

    def _has_fingerprint(self) -> bool:
        # Only rank 0 writes. But all ranks must gather sharded tensors, to compute the fingerprint.
        return self.module.global_rank == 0 or any(is_sharded(p) for p in self.module.parameters())

    def on_train_start(self) -> None:
        """Compute the base's fingerprint, to find tensors that training changes."""
        if self._has_fingerprint() and not (self.save_base or self.is_full):
            self.fingerprint.record(self.module)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the module's own hook, then remove the base from the checkpoint."""
        self._own_save(checkpoint)
        if self._has_fingerprint():
            strip_base(self.module, checkpoint, self.fingerprint, save_base=self.save_base or self.is_full)
            self.is_full |= checkpoint[CHECKPOINT_KEY]["base"] is None
            self.num_saved += 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the module's own hook, then reject a checkpoint that does not fit; nothing is loaded yet."""
        self._own_load(checkpoint)
        try:
            strict = self.module.strict_loading
            self._absent = check_adapter(self.module, checkpoint, self.fingerprint, strict=strict)
        except CheckpointError as error:
            path = getattr(self.module.trainer, "ckpt_path", None)
            raise CheckpointError(f"checkpoint {path} is not loaded: {error}") from error
        self.is_full = not self._absent

    def after_load(self, _: nn.Module, keys: Any) -> None:
        """Accept a missing base that `on_load_checkpoint` has checked; PyTorch rejects other missing keys."""
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in self._absent]
        self._absent = set()
