"""TextSample: equal seeds give equal texts, and the run does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.data.python_source import PythonSource
from lightning_eff.models.gpt import GPT
from lightning_eff.monitors.text_sample import TextSample
from tests.support.models import Net, make_loader, make_trainer


def fit(sample: TextSample, text_cache: Path, folder: Path) -> GPT:
    torch.manual_seed(0)
    model = GPT(vocab_size=300, context_length=16, d_model=16, num_layers=1, num_heads=2, dropout=0.5)
    data = PythonSource(
        vocab_size=300, context_length=16, batch_size=2, source_dir=str(text_cache), cache_dir=str(folder)
    )
    make_trainer(callbacks=[sample], max_steps=2, limit_val_batches=1).fit(model, datamodule=data)
    return model


def test_a_sample_continues_the_prompt_repeats_and_draws_no_random_numbers(
    text_cache: Path, tmp_path: Path
) -> None:
    texts, states = [], []
    for num_tokens in (8, 8, 1):
        sample = TextSample(prompt="def ", num_tokens=num_tokens)
        model = fit(sample, text_cache, tmp_path)
        assert model.training, "the module is in the mode that it was in"
        texts.append(sample.text)
        states.append(torch.random.get_rng_state())
    assert texts[0].startswith("def ")
    assert len(texts[0]) > len("def ")
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(states[0], states[2])


def test_a_module_that_cannot_generate_is_rejected(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match="generate") as caught:
        make_trainer(callbacks=[TextSample()]).fit(net(), make_loader())
    assert [each.python for each in caught.value.remedies] == ["remove TextSample"]
