"""Targets that PEFT would adapt to no effect, or wrongly, are rejected by name before training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.core.errors import ConfigError
from lightning_eff.models.gpt import GPT
from tests.support.models import Deep

GPT_SIZES = {"vocab_size": 11, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2}
LLAMA_SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(*, tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=tied))


class Delegating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(**GPT_SIZES)

    def get_input_embeddings(self) -> nn.Module:
        return self.net.embedding


TOKENS: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj"], "options": {"trainable_token_indices": [1, 2]}},
    "dict": {"target_modules": ["q_proj"], "options": {"trainable_token_indices": {"embed_tokens": [1]}}},
    "head": {"target_modules": ["q_proj"], "options": {"trainable_token_indices": {"lm_head": [1]}}},
    "method": {
        "method": "trainable_tokens",
        "target_modules": ["embed_tokens"],
        "options": {"token_indices": [1]},
    },
}


@pytest.mark.parametrize("named", list(TOKENS))
def test_trained_tokens_of_a_tied_weight_are_rejected_unless_peft_ties_them(named: str) -> None:
    with pytest.raises(ConfigError, match="is tied to net"):
        adapt(nn.ModuleDict({"net": llama(tied=True)}), **TOKENS[named])
    adapt(nn.ModuleDict({"net": llama(tied=False)}), **TOKENS[named])
    if named in ("list", "dict"):
        tied = llama(tied=True)
        adapt(tied, **TOKENS[named])
        assert type(tied.lm_head) is not nn.Linear, "PEFT trains the head's rows too"


def test_trained_tokens_of_a_tied_embedding_that_the_model_returns_are_rejected() -> None:
    with pytest.raises(ConfigError, match="is tied to net"):
        adapt(Delegating(), target_modules=["qkv"], options={"trainable_token_indices": [1]})


@pytest.mark.parametrize(
    ("indices", "targets"),
    [([0, 2], ["qkv"]), (-1, ["qkv"]), ([0], ["net.blocks.0.attention.qkv"]), ([0], ["all-linear"])],
)
def test_an_index_that_selects_no_layer_is_rejected(indices: Any, targets: list[str]) -> None:
    with pytest.raises(ConfigError, match="indices of blocks") as error:
        adapt(
            nn.ModuleDict({"net": GPT(**GPT_SIZES)}),
            target_modules=targets,
            options={"layers_to_transform": indices},
        )
    assert ("found 0, 1" in str(error.value)) is (targets == ["qkv"])


def test_indices_that_select_layers_are_accepted() -> None:
    options = {"layers_to_transform": [1], "rank_pattern": {"qkv": 2}}
    model = nn.ModuleDict({"net": GPT(**GPT_SIZES), "head": nn.Linear(4, 4)})
    model["net"].head = nn.Identity()
    names = list(adapt(model, target_modules=["qkv", "head"], options=options))
    assert names == ["net.blocks.1.attention.qkv", "head"]


@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["qvk", "blocks.5.attention.qkv", "kv"])
def test_a_pattern_of_no_targeted_layer_is_rejected(option: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=f"options.{option}='{pattern}'"):
        adapt(GPT(**GPT_SIZES), target_modules=["qkv"], options={option: {"qkv": 2, pattern: 4}})


class Momentum(nn.Module):
    """An online network with a copy, as BYOL, MoCo and DINO have it."""

    def __init__(self, online: nn.Module, *, frozen: bool = True) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"net": online, "norm": nn.LayerNorm(8)})
        self.target = copy.deepcopy(self.encoder).requires_grad_(requires_grad=not frozen)
        self.predictor = nn.Linear(8, 8)


@pytest.mark.parametrize("online", [nn.Linear(8, 8), Deep(), GPT(**GPT_SIZES)], ids=["layer", "deep", "gpt"])
def test_a_frozen_copy_of_a_trained_network_is_rejected_by_name(online: nn.Module) -> None:
    with pytest.raises(ConfigError, match="target is a frozen copy of encoder") as error:
        adapt(Momentum(copy.deepcopy(online)))
    assert error.value.value == ["target"]
    names = list(adapt(Momentum(copy.deepcopy(online)), options={"exclude_modules": "target.*"}))
    assert any(name.startswith("encoder") for name in names)
    assert not any(name.startswith("target") for name in names)


def test_two_copies_are_both_named() -> None:
    model = Momentum(Deep())
    model.add_module("second", copy.deepcopy(model.target))
    with pytest.raises(ConfigError, match=r"target\.\*\|second\.\*") as error:
        adapt(model)
    assert error.value.value == ["target", "second"]


def different(model: Momentum) -> None:
    for parameter in model.target.parameters():
        torch.nn.init.normal_(parameter)


def all_frozen(model: Momentum) -> None:
    model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("change", [different, all_frozen, lambda model: model.requires_grad_()])
def test_what_is_no_frozen_copy_of_a_trained_network_is_adapted(change: Any) -> None:
    model = Momentum(Deep())
    change(model)
    assert any(name.startswith("target") for name in adapt(model))


def test_frozen_blocks_among_trained_ones_are_adapted() -> None:
    model = Deep()
    model.blocks[0].requires_grad_(requires_grad=False)
    assert "blocks.0.linear" in adapt(model)
