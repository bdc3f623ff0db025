"""The fingerprint of what is frozen: by it an adapter knows the base that it was trained on.

An adapter is a difference, and on another base it is noise that nothing else would notice: names and shapes
are the same for every model of an architecture. The fingerprint is a SHA-256 over name, number format, shape
and SHA-256 of each frozen tensor, in the order of the names, the same on every device. Beside it stand the
first characters of each tensor's own, so that a refusal can name the tensors that are other ones.

Hashing reads every frozen byte once, in up to eight threads, the largest tensors by way of host memory, and
is not repeated until PyTorch counts a change of a tensor. Changes by way of `.data` are not counted. A tensor
in another number format is compared in the one that was recorded: a run may convert the model after its
checkpoint was restored. Buffers are not part of it: those that have a place in a checkpoint are saved with
the adapter, for training may change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.adapters import inject as adapters
from lightning_eff.adapters import quantized
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import is_sharded, full_shape, full_tensor

NUM_THREADS = 8
NUM_SHOWN_CHARACTERS = 16
"""Of a tensor's SHA-256: 64 bits, to tell which tensors differ once it is known that some do."""
NUM_NAMED = 3


def split(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's state as what is frozen, and what is trained or may change.

    Frozen are parameters without a gradient, and all that a quantized layer keeps. Buffers that
    have a place in a checkpoint are not, for running statistics change whatever is frozen; nor is what an
    adapter does not train of its own, which may have been drawn.

    Example:
        >>> layer = nn.BatchNorm1d(2).requires_grad_(False)
        >>> [list(part) for part in split(layer)]
        [['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked']]
    """
    around = adapters.wrapped(module)
    frozen = {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and not _of_adapter(name, around)
    }
    layers = of_quantized(module)
    base: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        inside = name in frozen or name.startswith(layers)
        kept = value if is_sharded(value) or not isinstance(value, Tensor) else value.detach()
        (base if inside else rest)[name] = kept
    return base, rest


def of_quantized(module: nn.Module) -> tuple[str, ...]:
    """Return what the names of tensors begin with that quantized layers keep."""
    return tuple(f"{name}." for name, layer in module.named_modules() if quantized.is_quantized(layer))


def _of_adapter(name: str, around: Iterable[str]) -> bool:
    """Say whether a tensor is an adapter's own, and not of the layer that it is around."""
    rest = next((name.removeprefix(f"{layer}.") for layer in around if name.startswith(f"{layer}.")), None)
    return rest is not None and not {"base_layer", "original_module"} & {*rest.split(".")}


def plain_name(name: str) -> str:
    """Return the name that a tensor has without adapters around its layer.

    Example:
        >>> plain_name("blocks.0.linear.base_layer.weight")
        'blocks.0.linear.weight'
    """
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


class Fingerprint:
    """Takes the fingerprint of a module's frozen tensors, and remembers those that did not change since.

    Args:
        exact: Without, what quantized layers keep may differ in value, as long as all else that is frozen is
            the same: another device rounds otherwise as it quantizes.
    """

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self.others: list[str] = []
        """Tensors that differed and were let pass."""
        self._known: dict[str, tuple[Tensor, int, torch.dtype, str]] = {}
        self.num_hashed = 0
        """Tensors that were read so far."""

    def record(self, module: nn.Module) -> dict[str, Any]:
        """Return the fingerprint in plain types, as it is kept in a checkpoint."""
        base, _ = split(module)
        digests = self._digests(module, base, {})
        return {
            "sha256": _sum(base, digests),
            "tensors": {
                plain_name(name): f"{_format(base[name])} {digest[:NUM_SHOWN_CHARACTERS]}"
                for name, digest in digests.items()
            },
        }

    def check(self, module: nn.Module, record: Any) -> None:
        """Hold a module's frozen tensors against a fingerprint.

        Args:
            module: Its base is read; nothing is changed.
            record: From a checkpoint, so it may be anything.

        Raises:
            CheckpointError: The base is another one; the first tensors that differ are named.
        """
        tensors: dict[str, str] = _tensors_of(record)
        base, _ = split(module)
        formats = {name: tensors.get(plain_name(name), "").partition(" ")[0] for name in base}
        digests = self._digests(module, base, formats)
        ours = {
            plain_name(name): f"{_format(base[name], formats[name])} {digest[:NUM_SHOWN_CHARACTERS]}"
            for name, digest in digests.items()
        }
        if _sum(base, digests, formats) == record["sha256"]:
            return
        others = sorted(name for name in {*ours, *tensors} if ours.get(name) != tensors.get(name))
        if not self.exact and _rounded(others, module, ours, tensors):
            self.others = others
            return
        count = len({*ours, *tensors})
        text = (
            f"it holds an adapter for another base: {named(others)} of {count} frozen tensors differ "
            f"(its fingerprint is {str(record['sha256'])[:12]!a})\n"
            "  try: callbacks.peft_adapter.base_checkpoint=PATH of its base, or its model.name and seed"
        )
        raise CheckpointError(text)

    def _digests(
        self, module: nn.Module, base: Mapping[str, Any], formats: Mapping[str, str]
    ) -> dict[str, str]:
        own = dict(module.named_parameters(remove_duplicate=False))
        names = [name for name, value in sorted(base.items()) if isinstance(value, Tensor)]
        if any(is_sharded(value) for value in base.values()):  # then all ranks hash, one tensor after the other
            return {name: self._digest(name, base[name], own, formats.get(name, "")) for name in names}
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            values = pool.map(lambda name: self._digest(name, base[name], own, formats.get(name, "")), names)
            return dict(zip(names, values, strict=True))

    def _digest(self, name: str, value: Tensor, own: Mapping[str, Tensor], wanted: str) -> str:
        """Return a tensor's SHA-256, in the number format that is wanted if that is one of PyTorch's."""
        parameter, dtype = own.get(name, value), _as_dtype(wanted, value)
        version = parameter._version  # noqa: SLF001 - PyTorch's count of changes in place
        before = self._known.get(name)
        if before is not None and before[0] is parameter and before[1:3] == (version, dtype):
            return before[3]
        digest, value = hashlib.sha256(), full_tensor(value)
        _feed(digest, value.detach().to(dtype) if value.dtype != dtype else value.detach())
        self._known[name] = (parameter, version, dtype, digest.hexdigest())
        self.num_hashed += 1
        return digest.hexdigest()


def _rounded(
    others: list[str], module: nn.Module, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> bool:
    """Say whether two bases differ in values of quantized layers alone, and have other frozen tensors too."""
    low = tuple(plain_name(name) for name in of_quantized(module))
    form = {name: (ours.get(name, "").split(" ")[0], theirs.get(name, "").split(" ")[0]) for name in others}
    alike = all(name.startswith(low) and here == there for name, (here, there) in form.items())
    return bool(others) and alike and any(not name.startswith(low) for name in ours)


def named(names: Iterable[str]) -> str:
    """Return the first few names and how many there are, also of names that come from a file.

    Example:
        >>> named(["a", "b", "c", "d"]), named(["a"])
        ("'a', 'b', 'c' and 1 more", "'a'")
    """
    given = list(names)
    shown = ", ".join(f"{name[:120]!a}" for name in given[:NUM_NAMED])
    return f"{shown} and {len(given) - NUM_NAMED} more" if len(given) > NUM_NAMED else shown or "none"


def _tensors_of(record: Any) -> dict[str, str]:
    given: dict[Any, Any] = record if isinstance(record, dict) else {}
    tensors: Any = given.get("tensors")
    plain = isinstance(tensors, dict) and all(isinstance(x, str) for pair in tensors.items() for x in pair)
    if not plain or not isinstance(given.get("sha256"), str):
        text = "it holds an adapter without the fingerprint of its base"
        raise CheckpointError(text)
    return tensors


def _as_dtype(word: str, value: Tensor) -> torch.dtype:
    """Return the floating-point format that a record names, for a tensor that has another one."""
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = (known | {"float64": torch.float64}).get(word.partition("[")[0], value.dtype)
    return dtype if value.is_floating_point() and value.dtype.itemsize > 1 else value.dtype


def _format(value: Tensor, wanted: str = "") -> str:
    dtype = str(_as_dtype(wanted, value)).removeprefix("torch.")
    return f"{dtype}[{','.join(str(n) for n in full_shape(value))}]"


def _sum(
    base: Mapping[str, Any], digests: Mapping[str, str], formats: Mapping[str, str] | None = None
) -> str:
    lines = (
        f"{plain_name(name)} {_format(base[name], (formats or {}).get(name, ''))} {digest}\n"
        for name, digest in digests.items()
    )
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _feed(digest: Any, value: Tensor) -> None:
    """Hash a tensor's values, in the order of its indices; of a tensor made of others, theirs."""
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for part in flatten()[0]:
            _feed(digest, getattr(value, part))
        return
    flat = value.cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
