"""Map what people type by habit from other tools to the overrides that mean it here: `habits.yaml`.

A row is looked up only for an override that cannot be used, so that a user's own option of the same name has
precedence. All proposals of a row are shown: which one a recipe takes depends on its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml


def read_habits() -> dict[str, tuple[str, ...]]:
    """Return by key, or by key and value, the overrides that it may stand for."""
    rows: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        word: tuple(text.replace("{key}", word) for text in meaning.split(" | "))
        for meaning, words in rows.items()
        for word in words.split()
    }


def proposals(key: str, value: str) -> Sequence[str]:
    """Return the overrides that `key=value` may stand for; none if the table does not have it.

    Example:
        >>> proposals("batch_size", "8"), proposals("trainer.precision", "bf16-mixed"), proposals("sed", "1")
        (('data.batch_size=8',), ('precision=bf16_mixed',), ())
    """
    habits = read_habits()
    row = habits.get(f"{key}={value.lower()}") or habits.get(key) or ()
    found = tuple(text.replace("{}", value) for text in row)
    if len(found) == 1:
        return proposals(*found[0].split("=", 1)) or found  # it may be a habit itself: trainer.strategy=zero2
    return found
