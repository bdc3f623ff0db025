"""How advice tries a technique: the overrides that its class states as `try_as`.

The list of candidates is read from the files of the techniques, so that a new one needs no entry elsewhere.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_eff.core.catalog import PACKAGE

GROUPS = ("callbacks", "optimizer", "precision", "strategy")
"""Folders of techniques that change the memory of a step."""
PART = "{part}"
"""Stands for a number of samples in the last override of a candidate that divides batches."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A technique as advice tries it.

    Args:
        words: Overrides of a recipe, as they are typed.
        needs: Facts without which it saves nothing: `run/cuda`, or an operation whose results are among the
            largest tensors at the peak (`peak/convolution`).
        note: What else it changes, or what it requires.
        is_chosen: Whether it may be chosen to make a recipe fit; otherwise its saving is shown alone.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    note: str = ""
    is_chosen: bool = True

    @property
    def divides(self) -> bool:
        """Whether it computes a batch in parts of some samples."""
        return PART in self.words[-1]


@functools.cache
def candidates() -> Sequence[Candidate]:
    """Return the candidates of all techniques; modules without one are not imported."""
    found: list[Candidate] = []
    for file in sorted(file for group in GROUPS for file in (PACKAGE / group).glob("[a-z]*.py")):
        if "    try_as = " in file.read_text(encoding="utf-8"):
            module = importlib.import_module(f"{PACKAGE.name}.{file.parent.name}.{file.stem}")
            own = [
                kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__
            ]
            # Not `getattr`: a derived class is another technique.
            found += [each for kind in own if isinstance(kind, type) for each in vars(kind).get("try_as", ())]
    return sorted(found, key=lambda each: each.divides)  # last: many parts take long to predict
