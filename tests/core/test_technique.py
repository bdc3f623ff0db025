"""What a technique is called, what was asked of it, and who is one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_eff.core.technique import config_of, name_of


class Foreign(pl.Callback):
    """Someone else's callback."""

    def __init__(self, ratio: float = 0.5, *, layers: Any = (), missing: int = 1) -> None:
        self.ratio = self
        self.layers = layers


def test_a_package_that_begins_like_ours_is_foreign() -> None:
    neighbour = type("Neighbour", (), {"__module__": "lightning_eff_extras.callbacks.neighbour"})
    assert name_of(neighbour()) == "Neighbour"


def test_plain_values_stay_others_become_text_and_itself_is_left_out() -> None:
    for value in (None, True, 3, 0.25, "auto"):
        assert config_of(Foreign(layers=value)) == {"layers": value, "missing": None}
    assert config_of(Foreign(layers=[torch.float16])) == {"layers": "[torch.float16]", "missing": None}
