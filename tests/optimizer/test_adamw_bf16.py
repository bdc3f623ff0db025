"""AdamWBf16: unbiased rounding, 4 bytes of state, bit-equal resumption, rejected parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.core.errors import ConfigError
from lightning_eff.optimizer import adamw_bf16
from lightning_eff.optimizer.adamw_bf16 import AdamWBf16, round_stochastically
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.live_bytes import state_bytes
from tests.support.prediction import GPT_OF, assert_predicted_is_measured, choice
from tests.support.ranks import is_equal

BF16 = torch.bfloat16
NUM_ROUNDINGS = 10_000


def of_bits(*bits: int) -> Tensor:
    """Return float32 values by their bits."""
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(
        torch.float32
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Bits of float32: normal numbers of both signs, one near the largest, two subnormal ones, and one near a tie.
@pytest.mark.parametrize("bits", [0x3F802000, 0xBF80E000, 0x7F7E4000, 0x00001000, 0x80018001, 0x4049FFFF])
def test_the_mean_of_ten_thousand_roundings_is_the_value(bits: int) -> None:
    rounded = round_stochastically(of_bits(bits).expand(NUM_ROUNDINGS).contiguous(), generator(bits))
    # The lower neighbour lacks the lower 16 bits; their fraction is the probability of rounding up.
    probability = (bits & 0xFFFF) / 65536
    low, high = of_bits(bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000).to(BF16)
    num_up = int((rounded == high).sum())
    assert num_up + int((rounded == low).sum()) == NUM_ROUNDINGS
    sigma = math.sqrt(NUM_ROUNDINGS * probability * (1 - probability))
    assert abs(num_up - NUM_ROUNDINGS * probability) <= 3 * sigma


def test_every_bfloat16_number_is_unchanged() -> None:
    values = torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(BF16)
    finite = values[~values.isnan()]
    assert len(finite) == (1 << 16) - 2 * 127
    assert torch.equal(round_stochastically(finite.float()).view(torch.int16), finite.view(torch.int16))


def test_nan_and_infinity_are_unchanged_and_no_finite_number_becomes_infinite() -> None:
    """Adding to the bits of CUDA's NaN would give -0; cutting off another NaN's low bits gives infinity."""
    nan = of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000)
    other = of_bits(0x7F800000, 0xFF800000, 0x7F7F0000, 0x7F7F7FFF, 0xFF7F7FFF, 0x7F7F8000)
    large = torch.finfo(BF16).max
    for seed in range(20):
        assert round_stochastically(nan, generator(seed)).isnan().all()
        expected = [math.inf, -math.inf, large, large, -large, math.inf]  # the last one to nearest
        assert round_stochastically(other, generator(seed)).tolist() == expected


def exact_gradients(shape: tuple[int, ...], num_steps: int) -> list[Tensor]:
    """Return gradients whose averages are bfloat16 numbers, for betas of 0.5 and 0.75 and three steps."""
    return [torch.randint(0, 2, shape, generator=generator(n)).mul(2.0).sub(1.0) for n in range(num_steps)]


@pytest.mark.parametrize("shape", [(), (5, 4), (2, 3, 4, 4), (0, 3)])
@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_without_rounding_a_step_is_bit_equal_to_adamw(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in chunks of rows, in channels-last memory, and with a scheduled learning rate."""
    monkeypatch.setattr(adamw_bf16, "CHUNK", chunk)
    options: dict[str, Any] = {"lr": 0.03, "betas": (0.5, 0.75), "weight_decay": 0.1, "eps": 1e-6}
    value = torch.randn(shape, generator=generator())
    value = value.to(memory_format=torch.channels_last) if len(shape) == 4 else value
    ours, theirs = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizers: list[Any] = [
        AdamWBf16([ours], **options),
        torch.optim.AdamW([theirs], **options, foreach=False),
    ]
    for step, gradient in enumerate(exact_gradients(shape, 3)):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.03 / (1 + step)
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)
    own, other = optimizers[0].state[ours], optimizers[1].state[theirs]
    assert own["step"] == 3
    assert all(torch.equal(own[name].float(), other[name]) for name in adamw_bf16.AVERAGES)
    assert own["exp_avg"].stride() == theirs.stride()


def test_a_slow_average_decays_although_rounding_to_nearest_would_keep_it_constant() -> None:
    """A decay of 0.1 % is less than half of the last of 8 bits."""
    options: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.999), "weight_decay": 0.0}
    found: list[Tensor] = []
    for kind in (functools.partial(torch.optim.AdamW, foreach=False), AdamWBf16):
        parameter = nn.Parameter(torch.zeros(4096, dtype=BF16))
        optimizer: Any = kind([parameter], **options)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
        for _ in range(300):
            optimizer.step()
        found.append(optimizer.state[parameter]["exp_avg_sq"].float())
    assert torch.equal(found[0], torch.ones(4096))
    # Each step adds at most a variance of (2**-8)**2 / 4 to a value; 3 sigma of the mean of 4096.
    assert float(found[1].mean()) == pytest.approx(0.999**300, abs=3 * 2**-9 * math.sqrt(300 / 4096))
    assert float(found[1].std()) > 1e-3, "every value draws its own bits"


def stack(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=generator(step)).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def half_and_half(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": 0.02}]


WRAPPED: dict[str, Callable[..., Any]] = {
    "alone": AdamWBf16,
    "in backward": functools.partial(InBackward, optimizer=AdamWBf16),
    "on the host": functools.partial(CpuOffload, optimizer=AdamWBf16),
}


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_resumed_run_is_bit_equal_alone_and_wrapped(wrapped: str, dtype: torch.dtype) -> None:
    whole = stack(dtype)
    train(whole, plain := AdamWBf16(half_and_half(whole), lr=0.01), range(8))
    again = stack(dtype)
    first = WRAPPED[wrapped](half_and_half(again), lr=0.01)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    train(again, first, range(4))
    assert torch.equal(torch.random.get_rng_state(), before), "the global random state was used"
    second = WRAPPED[wrapped](half_and_half(again), lr=0.5)
    first.close() if hasattr(first, "close") else None
    second.load_state_dict(first.state_dict())
    assert sum(state_bytes(second).values()) == 4 * sum(p.numel() for p in again.parameters())
    train(again, second, range(4, 8))
    assert is_equal([*again.parameters()], [*whole.parameters()])
    ours, theirs = second.state_dict()["state"], plain.state_dict()["state"]
    assert is_equal(ours, theirs)
    assert {each[name].dtype for each in ours.values() for name in adamw_bf16.AVERAGES} == {BF16}


def test_the_state_of_torchs_adamw_is_loaded_in_bfloat16() -> None:
    model = stack(torch.float32)
    torchs = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, torchs, range(3))
    optimizer = AdamWBf16(model.parameters(), lr=0.01)
    optimizer.load_state_dict(torchs.state_dict())
    train(model, optimizer, range(3, 4))
    assert [state["step"] for state in optimizer.state.values()] == [4] * 6
    assert sum(state_bytes(optimizer).values()) == 4 * sum(p.numel() for p in model.parameters())


def test_parameters_steps_and_seeds_draw_different_bits() -> None:
    def after(num_steps: int = 1, seed: int = 0) -> Tensor:
        tensors = [nn.Parameter(torch.ones(4096, dtype=BF16)) for _ in range(2)]
        optimizer = AdamWBf16(tensors, lr=2**-8, weight_decay=0.0, seed=seed)
        for _ in range(num_steps):
            for tensor in tensors:
                tensor.data.fill_(1.0)
                tensor.grad = torch.full_like(tensor, -0.5)
            optimizer.step()
        return torch.stack([tensor.detach() != 1.0 for tensor in tensors])

    first = after()
    assert is_equal(first, after())
    for other in (first.flip(0), after(seed=1), after(num_steps=2)):
        # Independent halves agree on half of 8192 values, with a sigma of 45.
        assert abs(int((first == other).sum()) - 4096) < 3 * 46 * math.sqrt(2)


def test_unsupported_parameters_gradients_and_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match="float16"):
        AdamWBf16([nn.Parameter(torch.ones(2, dtype=torch.float16))])
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = AdamWBf16(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    parameters = [nn.Parameter(torch.ones(2))]
    for name, value in (("lr", math.nan), ("weight_decay", -0.1)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            AdamWBf16(parameters, **{name: value})
    with pytest.raises(ConfigError, match="maximize=True"):
        AdamWBf16(parameters).load_state_dict(torch.optim.AdamW(parameters, maximize=True).state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_peak_is_predicted_to_the_byte(tmp_path: Path) -> None:
    def plugins() -> dict[str, Any]:
        return {"callbacks": [choice(AdamWBf16)], "plugins": [AutoPrecision(precision="bf16-true")]}

    assert_predicted_is_measured(GPT_OF, plugins, tmp_path)
