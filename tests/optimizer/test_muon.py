"""Muon: which parameters it steps, one schedule for Muon and AdamW, and checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.build import build, hidden_matrices
from lightning_eff.optimizer.muon import Muon


class Language(nn.Module):
    """An embedding, a hidden layer, a convolution, and an untied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, 11)


def names(model: nn.Module, parameters: Any) -> set[str]:
    chosen = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


TABLES = {"tokens": nn.Embedding(50, 8), "positions": nn.Embedding(8, 8), "mix": nn.Linear(8, 8)}


@pytest.mark.parametrize(
    ("model", "rest", "hidden"),
    [
        (Language(), (), {"hidden.weight"}),
        (Language(), ["hid*"], set()),
        (nn.ModuleDict({**TABLES, "own": nn.ParameterList([torch.zeros(8, 8)])}), (), {"mix.weight"}),
        (nn.MultiheadAttention(4, 2), (), {"in_proj_weight", "out_proj.weight"}),
    ],
)
def test_embeddings_heads_vectors_and_convolutions_are_not_hidden(
    model: nn.Module, rest: Any, hidden: set[str]
) -> None:
    assert names(model, hidden_matrices(model, rest)) == hidden


def test_muon_and_adamw_step_all_parameters_and_vectors_have_no_decay() -> None:
    model = Language()
    optimizer = build(model, functools.partial(Muon, lr=0.1, weight_decay=0.5))
    muon, adamw = optimizer.optimizers
    assert names(model, muon.param_groups[0]["params"]) == {"hidden.weight"}
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.5, 0.0]
    assert names(model, adamw.param_groups[1]["params"]) == {"hidden.bias", "convolution.bias", "head.bias"}
    assert len([p for group in optimizer.param_groups for p in group["params"]]) == 7
    assert optimizer.outcome().numbers == {"hidden": 1, "rest": 6}
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    assert {group["lr"] for part in optimizer.optimizers for group in part.param_groups} == {0.025}


def test_an_unmatched_pattern_and_a_model_without_hidden_matrices_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.rest"):
        hidden_matrices(Language(), ["nosuch.*"])
    with pytest.raises(ConfigError):
        build(nn.Embedding(3, 2), functools.partial(Muon, lr=0.1))


@pytest.mark.parametrize("start", ["both", "hidden alone"])
def test_a_group_that_is_added_later_is_trained_and_restored(start: str) -> None:
    torch.manual_seed(0)
    first, later = nn.Linear(4, 4, bias=start == "both"), nn.Linear(4, 4)

    def make() -> Muon:
        optimizer = Muon(first.parameters(), lr=0.1)
        optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.05})
        return optimizer

    optimizer = make()
    before = [parameter.detach().clone() for parameter in later.parameters()]
    later(first(torch.ones(1, 4))).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, later.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups][-2:] == [0.05, 0.05]
    again = make()
    again.load_state_dict(optimizer.state_dict())
    assert set(again.state) == set(optimizer.state)
    for parameter, state in optimizer.state.items():
        assert again.state[parameter].keys() == state.keys()
    again.step()
