"""A step of one rank alone; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

import pytest
import torch

from lightning_eff.checkpoint.collective import Ranks
from lightning_eff.core.errors import CheckpointError


def test_an_error_stays_what_it_is() -> None:
    ranks = Ranks(torch.device("cpu"))
    with pytest.raises(OSError, match="full"), ranks.agree():
        raise OSError(28, "full")


def test_the_first_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(torch.device("cpu"))
    told = [{"x": 1}, {"failed": "no space"}, {"failed": "neither"}]
    monkeypatch.setattr(ranks, "_tell", lambda _: told)
    with pytest.raises(CheckpointError, match=r"^rank 1: no space$"), ranks.agree():
        pass
