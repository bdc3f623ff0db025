"""HFCausalLM.generate: the tokens of transformers' own, greedy and drawn, and the same seed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.models.hf_causal_lm import HFCausalLM

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def model(tiny_llama: Path) -> HFCausalLM:
    torch.manual_seed(3)
    module = HFCausalLM(name=str(tiny_llama))
    module.configure_model()
    return module.eval()


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"temperature": 0.0}, {"do_sample": False}),
        ({"temperature": 2.0}, {"do_sample": True, "temperature": 2.0, "top_k": 0}),
        (
            {"temperature": 3.0, "top_k": 9, "top_p": 0.8},
            {"do_sample": True, "temperature": 3.0, "top_k": 9, "top_p": 0.8},
        ),
        ({"temperature": 1.5, "top_k": 1}, {"do_sample": False}),
    ],
)
def test_tokens_are_those_of_transformers(
    model: HFCausalLM, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    prompt = PROMPT.expand(3, -1)
    torch.manual_seed(7)
    expected = model.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **theirs
    )
    torch.manual_seed(1)
    state, seen = torch.get_rng_state(), list[torch.Tensor]()
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        found = model.generate(prompt, num_tokens=12, generator=generator, on_token=seen.append, **options)
        assert torch.equal(found, expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.stack(seen[: len(seen) // 2], 1), expected[:, 4:])
    model.generate(prompt, num_tokens=1, temperature=1.0)
    assert not torch.equal(torch.get_rng_state(), state), "without a generator the global one is used"


def test_a_text_ends_at_the_tokens_of_data_and_model(model: HFCausalLM) -> None:
    """Greedy, so that the token that comes second is known: then it ends the text."""
    plain = model.generate(PROMPT, num_tokens=8, temperature=0.0)[0, 4:].tolist()
    index = next(i for i, token in enumerate(plain) if i and token not in plain[:i])
    found = model.generate(PROMPT, num_tokens=8, temperature=0.0, stop_ids=[plain[index]])
    assert found[0, 4:].tolist() == plain[: index + 1]
    model.model.generation_config.eos_token_id = [plain[index], 1]
    assert model.generate(PROMPT, num_tokens=8, temperature=0.0)[0, 4:].tolist() == plain[: index + 1]


def test_what_the_models_config_says_of_sampling_does_not_hold(model: HFCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = model.generate(PROMPT, num_tokens=12, temperature=4.0, generator=generator)
    greedy = model.generate(PROMPT, num_tokens=12, temperature=0.0)
    assert not torch.equal(expected, greedy)
    model.model.generation_config.update(do_sample=True, top_k=1, top_p=0.1, temperature=0.1)
    assert torch.equal(model.generate(PROMPT, num_tokens=12, temperature=4.0, generator=generator), expected)
    assert torch.equal(model.generate(PROMPT, num_tokens=12, temperature=0.0), greedy)
    assert model.max_length == 128
