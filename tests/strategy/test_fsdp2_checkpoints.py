"""The rows that each of three ranks holds and reads, with a fake process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_eff.checkpoint.sharded import join
from lightning_eff.core.shards import local_rows
from lightning_eff.strategy._fsdp2 import DTensorState

NUM_RANKS = 3


@pytest.fixture(params=range(NUM_RANKS))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=NUM_RANKS)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("num_rows", [0, 2, 7])
def test_local_rows_match_torch_and_only_they_are_read(rank: int, num_rows: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    full = torch.arange(num_rows * 2.0).reshape(num_rows, 2)
    theirs = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    here = local_rows(theirs)
    assert here is not None
    assert torch.equal(full[here[0] : here[1]], theirs.to_local())
    saved = join(full.to("meta"), [full[:1].clone(), full[1:].clone()])
    parameter = torch.nn.Parameter(theirs.clone().zero_())
    DTensorState().load_tensor(parameter, saved)
    assert torch.equal(parameter.data.to_local(), theirs.to_local())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    DTensorState(optimizer).load_state(parameter, {"momentum_buffer": saved, "step": torch.tensor(3.0)})
    state = optimizer.state[parameter]
    assert isinstance(state["momentum_buffer"], DTensor)
    assert state["momentum_buffer"].shape == parameter.shape
    assert torch.equal(state["momentum_buffer"].to_local(), theirs.to_local())
    assert float(state["step"]) == 3.0
    assert len(saved.shards) == 2, "the other rows were not read"
    assert DTensorState(gathers=False).full_tensor(parameter) is parameter


def test_other_placements_have_no_local_rows(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    full = torch.ones(6, 6)
    for placement in (Shard(1), Replicate()):
        assert local_rows(distribute_tensor(full, mesh, [placement], src_data_rank=None)) is None
    square = init_device_mesh("cpu", (1, NUM_RANKS))
    divided = distribute_tensor(full, square, [Replicate(), Shard(0)], src_data_rank=None)
    assert local_rows(divided) is None
