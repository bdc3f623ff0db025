"""Targets that PEFT would adapt wrongly or without effect are rejected by name before training."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.core.errors import ConfigError
from lightning_eff.models.gpt import GPT

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
    if named == "list":
        tied = llama(tied=True)
        adapt(tied, **TOKENS[named])
        assert type(tied.lm_head) is not nn.Linear, "PEFT trains the head's rows too"


def test_trained_tokens_of_a_tied_embedding_that_the_model_returns_are_rejected() -> None:
    with pytest.raises(ConfigError, match="is tied to net"):
        adapt(Delegating(), target_modules=["qkv"], options={"trainable_token_indices": [1]})


def test_a_module_to_save_whose_name_is_the_end_of_another_word_is_rejected() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("body", "head", "lm_head")})
    with pytest.raises(ConfigError, match="the end of lm_head"):
        adapt(model, target_modules=["body"], modules_to_save=["head"])
    adapt(model, target_modules=["body"], modules_to_save=["head", "lm_head"])


def test_a_model_with_transposed_weights_may_be_set_up_twice() -> None:
    model = nn.ModuleDict({"body": Conv1D(4, 4)})
    assert list(adapt(model)) == ["body"]
    assert adapt(model) == {}
