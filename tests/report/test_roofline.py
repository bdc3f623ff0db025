"""Times by arithmetic: what a call costs, whose rate counts, and what a technique does to a step."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.kernels import devices
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.prediction import predict_step
from lightning_eff.report.roofline import (
    BUS_BYTES_PER_S,
    HOST_BYTES_PER_S,
    LAUNCH_S,
    Call,
    Rates,
    Work,
    call_of,
)

GPU = Rates(
    flops_per_s={torch.float32: 1e12, torch.bfloat16: 1e13}, bytes_per_s=1e11, call_s=0.0, is_gpu=True
)
H200 = DeviceMemory.of("h200", torch.device("cpu"))


def test_a_product_takes_its_operations_and_a_pass_its_bytes() -> None:
    product = Call("mm", flops=10**12, num_bytes=10**9, dtype=torch.float32)
    assert GPU.seconds(Work([product])) == 1.0
    assert GPU.seconds(Work([Call("mm", 10**12, 10**9, torch.bfloat16)])) == 0.1
    assert GPU.seconds(Work([Call("add", 0, 10**11, torch.float32)])) == 1.0
    assert GPU.seconds(Work([product, product], num_batches=4)) == 0.5


def test_host_storages_use_the_bus_or_host_memory() -> None:
    both, host = Call("copy_", 0, 10**9, torch.float32, (1, 2)), Call("add_", 0, 10**9, torch.float32, (2,))
    assert GPU.seconds(Work([both], {2})) == 1e9 / BUS_BYTES_PER_S
    assert GPU.seconds(Work([host], {2})) == 1e9 / HOST_BYTES_PER_S
    assert GPU.seconds(Work([both, host], {7})) == 2e9 / 1e11


def test_many_small_operations_take_their_launch_time() -> None:
    rates = Rates.of(devices.named("h200"))
    assert rates.seconds(Work([Call("add", 0, 8, torch.float32)] * 1000)) == pytest.approx(1000 * LAUNCH_S)


def test_views_cost_nothing_and_rows_of_a_table_only_themselves() -> None:
    x = torch.ones(1000, 8)
    assert call_of(torch.ops.aten.t.default, (x,), {}, x.t(), lambda _: 0) is None
    taken = torch.nn.functional.embedding(torch.tensor([3]), x)
    call = call_of(torch.ops.aten.embedding.default, (x, torch.tensor([3])), {}, taken, lambda _: 0)
    assert call is not None
    assert call.num_bytes == 2 * taken.nbytes


def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def blocks(*, again: bool) -> nn.Module:
    made = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(4)))
    if again:
        recompute(made)
    return made


def test_recomputing_is_one_more_forward_pass() -> None:
    """All products but each block's last run again: 4 beside 8 forward, 8 for weights and 7 for inputs."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    plain, again = (
        predict_step(functools.partial(blocks, again=flag), torch.ones(1 << 16, 512), step, sgd)
        for flag in (False, True)
    )
    assert plain.work is not None
    assert again.work is not None
    flops = [sum(call.flops for call in each.work.calls) for each in (plain, again) if each.work]
    assert flops[1] / flops[0] == 27 / 23
    before, after = (MemoryForecast(each, H200).seconds for each in (plain, again))
    assert before is not None
    assert after is not None
    assert 1.1 < after / before < 1.3


def test_an_optimizer_on_the_host_pays_for_the_bus() -> None:
    batch = torch.ones(8, 512)
    here, away = (
        predict_step(functools.partial(blocks, again=False), batch, step, functools.partial(kind, lr=0.1))
        for kind in (torch.optim.AdamW, CpuOffload)
    )
    rates = Rates.of(devices.named("h200"))
    assert here.work is not None
    assert away.work is not None
    weights = 8 * (512 * 512 + 512) * 4
    assert rates.seconds(away.work) - rates.seconds(here.work) > 2 * weights / BUS_BYTES_PER_S


def test_a_device_without_a_name_has_no_times() -> None:
    found = predict_step(functools.partial(blocks, again=False), torch.ones(2, 512), step, torch.optim.SGD)
    assert MemoryForecast(found, DeviceMemory("here", 2**40)).seconds is None
