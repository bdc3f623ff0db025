"""Say which overrides are meant by settings that are typed as options: `--trainer.max_steps 5`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_eff.config.habits import proposals
from lightning_eff.core import catalog


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that options like `--trainer.max_steps 5` mean; none if any is no setting.

    Example:
        >>> as_overrides(["--trainer.max_steps", "5", "--lr=0.1"]), as_overrides(["--rounds", "3"])
        (['trainer.max_steps=5', 'optimizer.lr=0.1'], [])
    """
    recipes = {entry.name for entry in catalog.recipes()}
    found: list[str] = []
    for word, following in itertools.pairwise([*words, "-"]):
        if not word.startswith("-"):
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        is_flag = following.startswith(("-", "~")) or "=" in following or following in recipes
        meant = _setting(name.replace("-", "_"), value if has_value else "true" if is_flag else following)
        if not meant:
            return []
        found.append(meant)
    return found


def _setting(key: str, value: str) -> str:
    """Return the override that sets a key, which may be another tool's word for it; empty if none does."""
    habits = proposals(key, value)
    own = {folder.name for folder in catalog.CONF.iterdir() if folder.is_dir()}
    own |= {name for name, _, _ in catalog.yaml_parameters(catalog.CONF / "run.yaml")}
    if key.partition(".")[0] in own and not habits:
        return f"{key}={value}"
    return (
        habits[0] if len(habits) == 1 else f"{key}={value}" if habits else ""
    )  # with several `train` decides
