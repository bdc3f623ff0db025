"""Sampling: which tokens are left of given logits, as in transformers, and what is drawn of them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightning_eff.models._sampling import draw, filter_logits

LOGITS = torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1, 2]),  # both have the second-largest logit
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.6}, [0, 2]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 1, "top_p": 0.9}, [0]),
        ({"top_p": 0.6, "temperature": 0.25}, [0]),  # 0.5**4 is 95 % of the fourth powers
        ({"top_p": 0.6, "temperature": 4.0}, [0, 1, 2]),  # fourth roots: 31, 25, 25 and 21 % for 10 %
    ],
)
def test_the_likeliest_tokens_are_left(options: dict[str, float], kept: list[int]) -> None:
    temperature = options.setdefault("temperature", 1.0)
    found = filter_logits(LOGITS, **options)  # pyright: ignore[reportArgumentType]
    assert found[0].isfinite().nonzero().flatten().tolist() == kept
    assert torch.equal(found[0, kept], LOGITS[0, kept] / temperature)


def test_one_token_is_left_however_small_the_probability_is() -> None:
    """In float32, where 1 - 1e-9 is 1."""
    found = filter_logits(torch.zeros(1, 9), temperature=1.0, top_p=1e-9)
    assert int(found.isfinite().sum()) == 1


@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.95])
def test_options_mean_what_they_mean_in_transformers(top_k: int | None, top_p: float | None) -> None:
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    expected = TemperatureLogitsWarper(0.7)(torch.zeros(5, 1, dtype=torch.long), logits)
    for warper in [TopKLogitsWarper(top_k)] if top_k else []:
        expected = warper(torch.zeros(5, 1, dtype=torch.long), expected)
    for warper in [TopPLogitsWarper(top_p)] if top_p else []:
        expected = warper(torch.zeros(5, 1, dtype=torch.long), expected)
    assert torch.equal(filter_logits(logits, temperature=0.7, top_k=top_k, top_p=top_p), expected)


def test_what_is_drawn_has_the_probabilities_of_what_is_left() -> None:
    rows = LOGITS.expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    counts = draw(rows, temperature=1.0, top_p=0.8, generator=generator).flatten().bincount(minlength=4)
    assert counts[3] == 0
    # 0.5, 0.2 and 0.2 of 0.9; five standard deviations, and unfiltered probabilities are 16 away.
    for count, probability in zip(counts[:3].tolist(), (5 / 9, 2 / 9, 2 / 9), strict=True):
        assert abs(count - 20_000 * probability) < 5 * math.sqrt(20_000 * probability * (1 - probability))
    assert torch.equal(draw(rows, temperature=0.0), torch.zeros(20_000, 1, dtype=torch.long))
