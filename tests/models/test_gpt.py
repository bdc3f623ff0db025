"""GPT: causal attention, rotary positions, the loss, sampling, and checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightning_eff.models.gpt import GPT, IGNORED_TARGET, Attention, next_token, rotate
from tests.support.models import fit

SIZES = {"vocab_size": 37, "context_length": 12, "d_model": 16, "num_layers": 2, "num_heads": 2}


def make_gpt(**keywords: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**(SIZES | keywords)).eval()


def loud_gpt(**keywords: Any) -> GPT:
    """Return a model with large weights, in which attention is far from uniform."""
    model = make_gpt(**keywords)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def draw_tokens(*shape: int) -> Tensor:
    """Return the same tokens for the same shape; a transposed shape gives different tokens."""
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def test_a_later_token_never_changes_earlier_logits() -> None:
    model, tokens = loud_gpt(), draw_tokens(3, 12)
    other = tokens.clone()
    other[:, 6] = (other[:, 6] + 1) % SIZES["vocab_size"]
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])


def test_rotation_is_a_complex_product() -> None:
    # A wrong sign, pairing or frequency is wrong by about 1; float32 angles are wrong by 1e-6.
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
    angle = torch.tensor([[m * 10_000 ** (-2 * i / 8) for i in range(4)] for m in range(12)]).double()
    pairs = torch.complex(x[:, :4].double(), x[:, 4:].double()) * torch.polar(torch.ones_like(angle), angle)
    attention = Attention(8, 1, 12, 0.0)
    rotated = rotate(x, attention.cos, attention.sin)
    assert torch.equal(rotated[0], x[0])
    torch.testing.assert_close(rotated.double(), torch.cat([pairs.real, pairs.imag], -1), rtol=0.0, atol=1e-5)


def test_attention_is_its_formula() -> None:
    # Swapped heads, a missing scale or an unrotated key are wrong by more than 1e-3.
    torch.manual_seed(0)
    attention = Attention(16, 2, 12, 0.0).double()
    x = torch.randn(3, 12, 16, dtype=torch.float64)
    heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in attention.qkv(x).split(16, -1)]
    q, k = (rotate(part, attention.cos, attention.sin) for part in heads[:2])
    scores = q @ k.mT / math.sqrt(8) + torch.full((12, 12), -math.inf).triu(1)
    expected = attention.out((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-12, atol=1e-12)


def test_embedding_and_head_are_one_parameter() -> None:
    model = make_gpt()
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters() if "head" in name] == []
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert [name for name in state if name.endswith((".cos", ".sin"))] == []
    state = make_gpt(tie_word_embeddings=False).state_dict()
    assert not torch.equal(state["head.weight"], state["embedding.weight"])


def test_initial_weights_have_the_spread_of_gpt2() -> None:
    model = make_gpt(d_model=128, num_layers=8)
    # A forgotten scale is wrong by a factor of 4; the spread of 16384 draws is 0.6 %.
    for name, std in (("attention.qkv", 0.02), ("attention.out", 0.005), ("mlp.down", 0.005)):
        weight = model.blocks[3].get_submodule(name).weight.detach()
        assert float(weight.std()) == pytest.approx(std, rel=0.03), name


def test_ignored_targets_add_nothing_to_the_loss() -> None:
    model, tokens, targets = loud_gpt().double(), draw_tokens(2, 12), draw_tokens(12, 2).T
    targets = targets.masked_fill(torch.arange(12) >= 7, IGNORED_TARGET)
    loss, kept = model.loss(model(tokens), targets), model(tokens)[:, :7].flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(kept, targets[:, :7].flatten()), rtol=1e-12, atol=0.0)
    other = torch.where(torch.arange(12) >= 7, (tokens + 1) % SIZES["vocab_size"], tokens)
    assert torch.equal(loss, model.loss(model(other), targets))
    assert not torch.equal(loss, model.loss(model(tokens), draw_tokens(12, 2).T))
    nothing = model.loss(model(tokens), torch.full_like(targets, IGNORED_TARGET))
    nothing.backward()
    assert nothing.item() == 0.0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_generate_follows_the_logits_of_the_last_context() -> None:
    model, tokens = loud_gpt(), draw_tokens(2, 11)
    options: list[dict[str, Any]] = [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-9}]
    outs = [model.generate(tokens, max_new_tokens=6)]
    outs += [model.generate(tokens, max_new_tokens=6, do_sample=True, **each) for each in options]
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens[:, -12:])[:, -1].argmax(-1, keepdim=True)], 1)
    for out in outs:
        assert torch.equal(out, tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 9},
        {"top_k": 2, "top_p": 0.6},  # 0.5 of 0.75: one token
        {"top_p": 0.6, "temperature": 4.0},  # fourth roots: three tokens
    ],
)
def test_tokens_are_drawn_as_often_as_transformers_would(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    expected = logits
    warpers = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    for name, warper in warpers.items():
        if name in options:
            expected = warper(options[name])(torch.zeros(1, 1, dtype=torch.long), expected)
    drawn = next_token(logits.expand(20_000, -1), do_sample=True, **options).flatten()
    # Four standard deviations; without one of the options some fraction is at least 0.1 away.
    fractions = drawn.bincount(minlength=4) / 20_000
    torch.testing.assert_close(fractions, expected.softmax(-1)[0], rtol=0.0, atol=0.015)


def test_a_fit_and_its_checkpoint_load_without_pickle(tmp_path: Path) -> None:
    model = make_gpt(dropout=0.1).train()
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = DataLoader(TensorDataset(draw_tokens(8, 12), draw_tokens(8, 12)), batch_size=4)
    trainer = fit(model, loader=rows, max_steps=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = GPT.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert dict(loaded.hparams) == SIZES | {"dropout": 0.1, "tie_word_embeddings": True}
    assert loaded.head.weight is loaded.embedding.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert not torch.equal(begun[name], tensor), f"{name} did not move"


@pytest.mark.parametrize("key", ["vocab_size", "context_length"])
def test_data_with_more_tokens_or_longer_rows_is_rejected(key: str) -> None:
    model = GPT(vocab_size=10, context_length=10, d_model=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="context_length=10"):
        model(torch.zeros(1, 11, dtype=torch.long))
    model.check_data(SimpleNamespace(**{key: 10}))
    with pytest.raises(ValueError, match=f"model.{key}=11"):
        model.check_data(SimpleNamespace(**{key: 11}))
