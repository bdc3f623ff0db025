"""Fingerprint of a frozen base: it ties an adapter to the base that it was trained on.

An adapter is a difference, and noise on another base; no key or shape shows that, since they are the same for
all models of an architecture. The fingerprint is, by name, the dtype, the shape and the first 64 bits of the
SHA-256 of each frozen tensor, so it is the same on each device, and an error can name what differs.

Hashing reads all frozen bytes once, in up to eight threads, through host memory, and again only when PyTorch
counts a change of a tensor in place. Changes through `.data` are not counted. A tensor of another dtype is
compared in the recorded one: a `-true` precision converts the model after its checkpoint is restored. Buffers
are not part of the fingerprint: training may change them, and persistent ones are saved with the adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.adapters.inject import wrapped_layers
from lightning_eff.adapters.module_tree import plain_name
from lightning_eff.adapters.quantized import quantized_prefixes
from lightning_eff.core.errors import CheckpointError, Remedy
from lightning_eff.core.shards import full_shape, full_tensor, is_sharded

NUM_THREADS = 8
NUM_DIGEST_CHARACTERS = 16
MAX_NAMES = 3
FLOAT_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def split_state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a module's state into the frozen base, and the rest: what is trained or may change.

    The base is parameters without a gradient, and all state of quantized layers. Persistent buffers belong to
    the rest, since running statistics change in frozen modules too; so do an adapter's own frozen tensors,
    which may be random.

    Example:
        >>> layer = nn.BatchNorm1d(2).requires_grad_(False)
        >>> [list(state) for state in split_state(layer)]
        [['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked']]
    """
    wrappers = [f"{name}." for name in wrapped_layers(module)]
    frozen: set[str] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # a name outside of all wrappers counts as the base's
        inner = next((name.removeprefix(w) for w in wrappers if name.startswith(w)), "base_layer")
        if not parameter.requires_grad and {"base_layer", "original_module"} & {*inner.split(".")}:
            frozen.add(name)
    quantized = quantized_prefixes(module)
    base, rest = dict[str, Any](), dict[str, Any]()
    for name, value in module.state_dict(keep_vars=True).items():
        is_plain = isinstance(value, Tensor) and not is_sharded(value)
        state = base if name in frozen or name.startswith(quantized) else rest
        state[name] = value.detach() if is_plain else value
    return base, rest


def format_names(names: Iterable[str]) -> str:
    """Return the first names and the number of the rest; names from a file are shortened and escaped.

    Example:
        >>> format_names(["a", "b", "c", "d"]), format_names(["a"])
        ("'a', 'b', 'c' and 1 more", "'a'")
    """
    known = list(names)
    shown = ", ".join(f"{name[:120]!a}" for name in known[:MAX_NAMES])
    return f"{shown} and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else shown or "none"


class Fingerprint:
    """Fingerprint a module's frozen tensors, with a cache of digests by tensor and version.

    Args:
        exact: False lets values of quantized layers differ, as long as all other frozen tensors are the same:
            another device rounds differently when it quantizes.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self.others: list[str] = []
        """Names of tensors that differed and were accepted."""
        self.num_hashed = 0
        """Tensors that were read so far."""
        self._digests_by_name: dict[str, tuple[Tensor, int, torch.dtype, str]] = {}

    def record(self, module: nn.Module) -> dict[str, Any]:
        """Return the fingerprint in plain types, as a checkpoint keeps it."""
        return {"tensors": self._hash(module, {})}

    def check(self, module: nn.Module, record: Any) -> None:
        """Compare a module's frozen tensors with a fingerprint from a checkpoint, which may be anything.

        Raises:
            CheckpointError: It is another base; the first tensors that differ are named.
        """
        expected: Any = record.get("tensors") if isinstance(record, dict) else None
        texts = [text for pair in expected.items() for text in pair] if isinstance(expected, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise CheckpointError("it holds an adapter without the fingerprint of its base")
        tensors = self._hash(module, expected)
        names = {*tensors, *expected}
        others = sorted(name for name in names if tensors.get(name) != expected.get(name))
        if others and not self.exact:
            # Rounding explains other values, not other layouts, in quantized layers, and only if unquantized
            # frozen tensors prove that it is the same base.
            quantized = tuple(f"{plain_name(prefix[:-1])}." for prefix in quantized_prefixes(module))
            layouts = [[known.get(n, "").partition(" ")[0] for n in others] for known in (tensors, expected)]
            is_rounding = all(name.startswith(quantized) for name in others) and layouts[0] == layouts[1]
            if is_rounding and any(not name.startswith(quantized) for name in tensors):
                self.others = others
                return
        if others:
            differ = f"{format_names(others)} of {len(names)} frozen tensors differ"
            base = Remedy(
                "callbacks.peft_adapter.base_checkpoint=PATH of its base, or its model.name and seed",
                "PeftAdapter(base_checkpoint=PATH of its base), or the model's own name and seed",
            )
            raise CheckpointError(f"it holds an adapter for another base: {differ}\n  try: {base}")

    def _hash(self, module: nn.Module, recorded: Mapping[str, str]) -> dict[str, str]:
        """Return each frozen tensor's `dtype[shape]` and start of its digest, by plain name.

        In the recorded dtype if both are floating-point of more than 8 bits.
        """
        base = {name: value for name, value in split_state(module)[0].items() if isinstance(value, Tensor)}
        parameters = base | dict(module.named_parameters(remove_duplicate=False))

        def layout_and_digest(name: str) -> str:
            value = base[name]
            is_wide = value.is_floating_point() and value.dtype.itemsize > 1
            saved = recorded.get(plain_name(name), "").partition("[")[0] if is_wide else ""
            dtype = FLOAT_DTYPES.get(saved, value.dtype)
            shape = ",".join(str(n) for n in full_shape(value))
            digest = self._digest(name, value, parameters[name], dtype)[:NUM_DIGEST_CHARACTERS]
            return f"{str(dtype).removeprefix('torch.')}[{shape}] {digest}"

        names = sorted(base)
        if any(is_sharded(value) for value in base.values()):
            # Gathering a sharded tensor is a collective of all ranks: one after the other, in one order.
            texts = [layout_and_digest(name) for name in names]
        else:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                texts = list(pool.map(layout_and_digest, names))
        return {plain_name(name): text for name, text in zip(names, texts, strict=True)}

    def _digest(self, name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> str:
        """Return the SHA-256 of a tensor's values in a dtype, from the cache if it did not change.

        `parameter` is the parameter, of which `value` may be a detached view that is new in each call.
        """
        version = parameter._version  # noqa: SLF001 - torch 2.13's count of changes in place
        cached = self._digests_by_name.get(name)
        if cached is not None and cached[0] is parameter and cached[1:3] == (version, dtype):
            return cached[3]
        digest, full = hashlib.sha256(), full_tensor(value).detach()
        parts = [full.to(dtype) if full.dtype != dtype else full]
        while parts:
            part: Any = parts.pop(0)
            if hasattr(part, "__tensor_flatten__"):  # a wrapper subclass: its inner tensors
                parts = [*(getattr(part, key) for key in part.__tensor_flatten__()[0]), *parts]
                continue
            flat = part.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        self._digests_by_name[name] = (parameter, version, dtype, digest.hexdigest())
        self.num_hashed += 1
        return digest.hexdigest()
