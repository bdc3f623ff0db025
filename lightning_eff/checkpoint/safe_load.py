"""Load only tensors and plain values from a `torch.save` file; convert hyperparameters to plain values."""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from pickle import UnpicklingError  # the exception only: nothing is unpickled here
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import torch
from omegaconf import ListConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_eff.core.errors import CheckpointError, CheckpointWarning
from lightning_eff.core.secret_values import is_secret

UNREADABLE = (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError)
"""Errors that `torch.load` raises about a file whose content it cannot read."""


def load_plain(file: IO[bytes] | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Load a file's tensors and plain values.

    The caller must verify the file's digest, because torch accepts most files with a flipped bit.

    Args:
        file: An open file, or a path.
        map_location: Device of the tensors.
        mmap: Map the file into memory, so that only the tensors in use are read; `file` must be a path.

    Raises:
        CheckpointError: The file holds other objects, or torch cannot read the file.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        found = re.search(r"GLOBAL ([\w.]{1,100}) was not an allowed", str(error))  # text of torch 2.13
        if found:
            text = (
                f"it holds a {found[1]}, but only tensors and plain values are loaded\n"
                "  try: torch.serialization.add_safe_globals([...]) if you trust it"
            )
        else:
            text = f"torch cannot read it ({str(error).splitlines()[0][:200] if str(error) else error!r})"
        raise CheckpointError(text) from error


HPARAMS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Lightning's keys for hyperparameters in a checkpoint, each with the key for an OmegaConf config's class."""
TORCH = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size)
BASIC: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, str, bytes)
CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda member: member.value),
    ((np.generic, np.ndarray), lambda array: array.tolist()),
    (PurePath, str),
    ((Namespace, SimpleNamespace), vars),
    (ListConfig, list),
)


def with_plain_hparams(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with hyperparameters that `load_plain` accepts.

    Paths become strings; enums and NumPy numbers and arrays become their values; configs, namespaces and
    dataclasses become dictionaries. Other objects and secrets are dropped.

    Warns:
        CheckpointWarning: Entries were dropped; the warning names these entries.
    """
    result, left_out = dict(checkpoint), list[str]()
    for key, class_key in HPARAMS.items():
        if isinstance(saved := result.get(key), Mapping):
            result[key] = _plain(saved, "", left_out)
            result.pop(class_key, None)
    if left_out:
        names = ", ".join(left_out)
        text = f"hyperparameters left out of checkpoints, as no plain values or secrets: {names}. "
        text += "A run resumes without them; pass them to `load_from_checkpoint` as arguments"
        warnings.warn(text, CheckpointWarning, stacklevel=3)
    return result


def _plain(value: Any, name: str, left_out: list[str]) -> Any:
    """Return a value in plain types; drop entries without a plain form, and add their names to `left_out`.

    Raises:
        TypeError: The value itself has no plain form, or is a secret.
    """
    # A value may need several conversions, since an enum's value may be a path.
    for kinds, convert in CONVERSIONS:
        if isinstance(value, kinds):
            value = convert(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        result: dict[Any, Any] = {}
        for key in cast(Mapping[Any, Any], value):
            path = f"{name}.{key}" if name else str(key)
            try:
                result[_plain(key, path, left_out)] = _plain(value[key], path, left_out)
            except (TypeError, OmegaConfBaseException):  # the latter: an interpolation of a missing key
                left_out.append(path)
        return result
    # torch.Size is a tuple too, but torch loads it unchanged.
    if isinstance(value, (list, tuple, set, frozenset)) and type(value) not in TORCH:
        values = [_plain(each, name, left_out) for each in cast(Iterable[Any], value)]
        return (
            values if isinstance(value, list) else tuple(values) if isinstance(value, tuple) else set(values)
        )
    basic = next((kind for kind in BASIC if isinstance(value, cast(type, kind))), None)
    is_other = basic is None and value is not None and type(value) not in TORCH
    if is_other or is_secret(name.rpartition(".")[2], value):
        raise TypeError(name)
    # Subclasses, such as a string enum or numpy's float64, become the basic type.
    return value if basic is None else basic(value)
