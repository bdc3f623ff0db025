"""What a technique is called, what was asked of it, and who is one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.core.technique import Outcome, Technique, config_of, name_of
from lightning_eff.monitors.progress import Progress
from lightning_eff.precision.auto import AutoPrecision


class Foreign(pl.Callback):
    """Someone else's callback that can say what it did."""

    def __init__(self, ratio: float = 0.5, *, layers: Any = (), missing: int = 1, me: Any = None) -> None:
        self.ratio = ratio
        self.layers = layers
        self.me = self if me is None else me

    def outcome(self) -> Outcome:
        return Outcome(did="nothing yet", effective=False)


def test_ours_are_named_by_their_module() -> None:
    assert name_of(EmptyCache()) == "callbacks/empty_cache"
    assert name_of(AutoPrecision(precision="32-true")) == "precision/auto"


def test_foreign_ones_are_named_by_their_class() -> None:
    assert name_of(Foreign()) == "Foreign"
    neighbour = type("Neighbour", (), {"__module__": "lightning_eff_extras.callbacks.neighbour"})
    assert name_of(neighbour()) == "Neighbour", "a package that begins like ours"


@pytest.mark.parametrize("value", [None, True, 3, 0.25, "auto"])
def test_plain_values_stay_and_others_become_text(value: object) -> None:
    assert config_of(Foreign(layers=value, me=1)) == {"ratio": 0.5, "layers": value, "missing": None, "me": 1}
    assert config_of(Foreign(layers=[torch.float16]))["layers"] == "[torch.float16]"


def test_a_technique_that_keeps_itself_is_not_asked_for_it() -> None:
    assert list(config_of(Foreign())) == ["ratio", "layers", "missing"]


def test_techniques_are_those_that_say_their_outcome() -> None:
    ours, foreign = EmptyCache(), Foreign()
    candidates = [foreign, pl.callbacks.Timer(), object(), None, ours]
    assert [each for each in candidates if isinstance(each, Technique)] == [foreign, ours]
    assert not isinstance(Progress(), Technique), "a monitor changes nothing, so it has no outcome"
