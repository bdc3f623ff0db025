"""FLOPs by hand, forward and backward; times by arithmetic: what a call costs, and on which device."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.kernels.devices import DEVICES, Device
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.prediction import predict_step
from lightning_eff.report.roofline import (
    BUS_BYTES_PER_S,
    HOST_BYTES_PER_S,
    LAUNCH_S,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Call,
    FlopCount,
    Work,
    call_of,
)


def count(module: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """Return the FLOPs of the forward and of the backward pass."""
    with FlopCount() as forward:
        out = module(*inputs)
    with FlopCount() as backward:
        out.sum().backward()
    return forward.flops, backward.flops


def draw(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=requires_grad)


class Attend(nn.Module):
    def forward(self, *qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv)


class Recompute(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


LINEAR, ROWS = 2 * 5 * 3 * 7, 2 * (2 * 4 * 5) * 3 * 7
CONV = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
ATTENTION = 2 * (2 * 3) * 4 * 6 * 8
"""One product of B = 2, H = 3, 4 queries, 6 keys, D = 8; the CPU's kernel computes the scores again."""
QKV = (draw(2, 3, 4, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8))
LAYERS = (nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
PAIR = 2 * 2 * 5 * 7 * 7


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (nn.Linear(7, 3, bias=False), [draw(5, 7)], (LINEAR, 2 * LINEAR)),
        (nn.Linear(7, 3), [draw(2, 4, 5, 7)], (ROWS, 2 * ROWS)),
        (nn.Linear(7, 3), [draw(5, 7, requires_grad=False)], (LINEAR, LINEAR)),
        (nn.Linear(7, 3).requires_grad_(requires_grad=False), [draw(5, 7)], (LINEAR, LINEAR)),
        (nn.Conv2d(3, 4, 3, padding=1), [draw(2, 3, 6, 6)], (CONV, 2 * CONV)),
        (nn.Conv2d(3, 4, 3, padding=1), [draw(2, 3, 6, 6, requires_grad=False)], (CONV, CONV)),
        (Attend(), QKV, (2 * ATTENTION, 5 * ATTENTION)),
        (nn.Sequential(*LAYERS), [draw(5, 7)], (PAIR, 2 * PAIR)),
        (Recompute(*LAYERS), [draw(5, 7)], (PAIR, 3 * PAIR)),
        (nn.Sequential(nn.GELU(), nn.Softmax(-1)), [draw(9, 9)], (0, 0)),
    ],
)
def test_flops_by_hand(module: nn.Module, inputs: list[Tensor], expected: tuple[int, int]) -> None:
    assert count(module, *inputs) == expected


def test_attention_without_a_kernel_is_two_products_forward_and_four_backward() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert count(Attend(), *QKV) == (2 * ATTENTION, 4 * ATTENTION)


def test_counts_add_up_and_stop_outside() -> None:
    counted, x = FlopCount(), torch.ones(2, 2)
    for expected in (16, 32):
        with counted:
            _ = x @ x
        assert counted.flops == expected
        _ = x @ x
    with FlopCount() as outer, FlopCount() as inner:
        _ = torch.addmm(x, mat1=x, mat2=x)
    assert (outer.flops, inner.flops) == (16, 16)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_higher_order_operator_runs_inside() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    with FlopCount() as counted, torch.no_grad():
        assert flex_attention(q, q, q).shape == q.shape
    assert counted.flops == 2 * (2 * 1 * 2 * 16 * 16 * 8), "scores and weighted values"


GPU = Device(
    name="of a test", capability=90, num_sms=1, memory_gbs=100 / MEMORY_EFFICIENCY, l2_gbs=1, l2_bytes=1,
    shared_bytes=1, memory_bytes=1,
    peak_tflops={"float32": 1 / MATMUL_EFFICIENCY, "bfloat16": 10 / MATMUL_EFFICIENCY},
)  # fmt: skip
"""1e12 operations a second, ten times as many in bfloat16; 1e11 bytes a second."""
PRODUCT = Call("mm", flops=10**12, num_bytes=10**9, dtype=torch.float32)
BOTH, HOST = Call("copy_", 0, 10**9, torch.float32, (1, 2)), Call("add_", 0, 10**9, torch.float32, (2,))


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work([PRODUCT]), 1.0),
        (Work([Call("mm", 10**12, 10**9, torch.bfloat16)]), 0.1),
        (Work([Call("add", 0, 10**11, torch.float32)]), 1.0),
        (Work([PRODUCT, PRODUCT], num_batches=4), 0.5),
        (Work([BOTH], {2}), 1e9 / BUS_BYTES_PER_S),
        (Work([HOST], {2}), 1e9 / HOST_BYTES_PER_S),
        (Work([BOTH, HOST], {7}), 2e9 / 1e11),
        (Work([Call("add", 0, 8, torch.float32)] * 1000), 1000 * LAUNCH_S),
    ],
)
def test_a_call_takes_the_longer_of_its_operations_and_its_bytes(work: Work, seconds: float) -> None:
    assert work.seconds(GPU) == pytest.approx(seconds, rel=1e-12)


def test_views_cost_nothing_and_rows_of_a_table_only_themselves() -> None:
    x = torch.ones(1000, 8)
    assert call_of(torch.ops.aten.t.default, (x,), {}, x.t(), lambda _: 0) is None
    taken = F.embedding(torch.tensor([3]), x)
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
    h200 = DeviceMemory.of("h200", torch.device("cpu"))
    flops, times = list[int](), list[float]()
    for again in (False, True):
        found = predict_step(functools.partial(blocks, again=again), torch.ones(1 << 16, 512), step, sgd)
        seconds = MemoryForecast(found, h200).seconds
        assert found.work is not None
        assert seconds is not None
        flops.append(sum(call.flops for call in found.work.calls))
        times.append(seconds)
    assert flops[1] / flops[0] == 27 / 23
    assert 1.1 < times[1] / times[0] < 1.3
    assert MemoryForecast(found, DeviceMemory("here", 2**40)).seconds is None, "a device without rates"


def test_an_optimizer_on_the_host_pays_for_the_bus() -> None:
    batch = torch.ones(8, 512)
    here, away = (
        predict_step(functools.partial(blocks, again=False), batch, step, functools.partial(kind, lr=0.1))
        for kind in (torch.optim.AdamW, CpuOffload)
    )
    assert here.work is not None
    assert away.work is not None
    weights, h200 = 8 * (512 * 512 + 512) * 4, DEVICES["h200"]
    assert away.work.seconds(h200) - here.work.seconds(h200) > 2 * weights / BUS_BYTES_PER_S
