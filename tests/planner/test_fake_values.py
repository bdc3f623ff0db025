"""Values of fake tensors: computed where they are known, else plausible, and listed as assumed."""

from __future__ import annotations

import pytest
import torch

from lightning_eff.planner.fakes import Fakes


def test_counts_of_a_batch_are_computed() -> None:
    targets = torch.tensor([[5, -100, 7], [-100, -100, 2]])
    with Fakes() as fakes:
        fake = fakes.of(targets)
        valid = fake != -100
        assert int(valid.sum()) == 3
        assert fake.max().item() == 7
        assert valid[0].tolist() == [True, False, True]
        assert float(valid.float().mean()) == 0.5
        assert fake[valid].shape == (3,)
        assert torch.randn(2, 3, 4)[valid].shape == (3, 4)
        assert valid.nonzero().shape == (3, 2)
    assert fakes.assumed == []


def test_unknown_values_are_those_of_a_good_step() -> None:
    with Fakes() as fakes:
        x = torch.randn(3)
        assert bool(x.isfinite().all())
        assert not x.isnan().any()
        assert not torch.logical_or(x.isnan(), x.isinf()).any()
        assert (x.sum() > 0).item() is True
        assert x.long().sum().item() == 1
        assert 0.0 < x.sum().item() < 1.0
    assert len(fakes.assumed) == 6
    assert all(
        "test_unknown_values_are_those_of_a_good_step (test_fake_values.py:" in each for each in fakes.assumed
    )


def test_a_value_that_is_overwritten_is_forgotten() -> None:
    with Fakes() as fakes:
        count = fakes.of(torch.tensor(5))
        assert count.item() == 5
        count.add_(torch.randn(()).long())
        assert count.item() == 1
    assert len(fakes.assumed) == 1


def test_constants_are_known() -> None:
    with Fakes() as fakes:
        assert torch.full((), 3.5).item() == 3.5
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        assert torch.arange(4).sum().item() == 6
    assert fakes.assumed == []


def test_a_loss_scaler_finds_nothing_infinite() -> None:
    with Fakes():
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        stepped: list[bool] = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert stepped == [True]


def test_an_unknown_mask_cannot_index() -> None:
    with Fakes():
        x = torch.randn(3)
        mask = x > 0
        with pytest.raises(Exception, match="nonzero"):
            x[mask].sum()
