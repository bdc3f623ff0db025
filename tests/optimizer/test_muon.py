"""Muon: which parameters it takes, one schedule for both parts, checkpoints, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.configure_optimizers import build, hidden_matrices
from lightning_eff.errors import ConfigError
from lightning_eff.optimizer.muon import Muon, split


class Language(nn.Module):
    """An embedding, a hidden layer, a convolution, an output layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 11)


def names(model: nn.Module, parameters: Any) -> set[str]:
    chosen = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_embeddings_heads_vectors_and_convolutions_are_not_hidden() -> None:
    model = Language()
    assert names(model, hidden_matrices(model)) == {"hidden.weight"}
    assert names(model, hidden_matrices(model, ["hid*"])) == set()


def test_the_two_parts_take_all_parameters_and_norms_and_biases_no_decay() -> None:
    model = Language()
    optimizer = build(model, functools.partial(Muon, lr=0.1, weight_decay=0.5))
    muon, adamw = optimizer.parts
    assert names(model, muon.param_groups[0]["params"]) == {"hidden.weight"}
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.5, 0.0]
    assert names(model, adamw.param_groups[1]["params"]) == {"hidden.bias", "convolution.bias", "head.bias"}
    assert len([p for group in optimizer.param_groups for p in group["params"]]) == 7
    assert optimizer.outcome().numbers == {"hidden": 1, "rest": 6}


def test_patterns_name_more_of_the_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = build(model, functools.partial(Muon, lr=0.1, rest=["1.*"]))
    assert names(model, optimizer.parts[0].param_groups[0]["params"]) == {"0.weight"}


def test_a_schedule_moves_both_parts() -> None:
    model = Language()
    optimizer = build(model, functools.partial(Muon, lr=1.0))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {0.25}


def test_what_was_loaded_is_what_the_parts_use() -> None:
    torch.manual_seed(0)
    model = Language()
    first = build(model, functools.partial(Muon, lr=0.1))
    model.head(model.hidden(model.table(torch.tensor([1, 2])))).sum().backward()
    first.step()
    second = build(model, functools.partial(Muon, lr=0.7))
    second.load_state_dict(first.state_dict())
    assert [group["lr"] for group in second.parts[0].param_groups] == [0.1]
    buffer = second.parts[0].state[model.hidden.weight]["momentum_buffer"]
    assert torch.equal(buffer, first.state[model.hidden.weight]["momentum_buffer"])
    assert buffer is second.state[model.hidden.weight]["momentum_buffer"]


def test_a_bare_list_of_parameters_is_split_by_dimension() -> None:
    layer = nn.Linear(2, 2)
    hidden, rest = split(layer.parameters())
    assert [group["params"] for group in hidden] == [[layer.weight]]
    assert [group["params"] for group in rest] == [[layer.bias]]


def test_without_a_hidden_matrix_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a model with hidden matrices[\s\S]*optimizer=adamw"):
        build(nn.Embedding(3, 2), functools.partial(Muon, lr=0.1))
