"""Random states are captured and restored bit for bit, with the deviate that NumPy caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from lightning_eff.core import random_states


@pytest.fixture(autouse=True)
def _same_state_afterwards() -> Iterator[None]:
    before = np.random.get_state()
    yield
    np.random.set_state(before)
    random_states._numpy_state_of.cache_clear()


def of_numpy() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=False)
    words = state["state"]
    return words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"]


DRAWS = {
    "nothing": lambda: None,
    "one number": np.random.random,
    "one deviate": np.random.randn,
    "two deviates": lambda: np.random.randn(2),
    "624 words": lambda: np.random.randint(2**32, size=624, dtype=np.uint32),
    "another seed": lambda: np.random.seed(7),
}


@pytest.mark.parametrize("first", DRAWS)
def test_the_state_is_numpys_after_each_draw(first: str) -> None:
    np.random.seed(0)
    for second in DRAWS:
        for draw in (first, second, second, first):
            DRAWS[draw]()
            assert random_states.capture()["numpy"] == of_numpy()
    states = random_states.capture()
    np.random.randn(3)
    random_states.restore(states)
    assert random_states.capture()["numpy"] == of_numpy() == states["numpy"]


def test_numpy_is_asked_only_if_the_memory_of_its_generator_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.random.seed(0)
    get_state = Mock(wraps=np.random.get_state)
    monkeypatch.setattr(np.random, "get_state", get_state)
    counts: list[int] = []
    for draw in ("another seed", "nothing", "nothing", "one number", "nothing", "one deviate", "nothing"):
        DRAWS[draw]()
        random_states.capture()
        counts.append(get_state.call_count)
    # A deviate that is kept may have been taken.
    assert counts == [1, 1, 1, 2, 2, 3, 4]
