"""Map names and values of other tools to the equivalent overrides here: `habits.yaml`.

`hydra_errors.py` and the command line's parser look up a row only for a word that cannot be used. So a user's
own option of the same name has precedence. All proposals of a row are shown, since the right one depends on
the recipe's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml


def read_habits() -> dict[str, tuple[str, ...]]:
    """Return the overrides that each key, or each key with a value, may mean."""
    rows: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        word: tuple(text.replace("{key}", word) for text in meaning.split(" | "))
        for meaning, words in rows.items()
        for word in words.split()
    }


def proposals(key: str, value: str) -> Sequence[str]:
    """Return the overrides that `key=value` may mean; empty if the table lacks it.

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
