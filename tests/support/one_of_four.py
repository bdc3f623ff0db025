"""Rank 0 of four that are not there: what DeepSpeed and FSDP2 really hold, as JSON.

Collectives of a fake process group move nothing. It needs its own process, since a group and DeepSpeed's
engine stay behind.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

DEVICES = 4
PERSISTENT = 500


class Block(nn.Module):
    """Two linear layers around which a stack is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Three blocks; no size of it but the head's divides by four evenly and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fsdp2() -> dict[str, int]:
    """Train a step; return bytes of weights and of state."""
    from lightning_eff.strategy._fsdp2 import shard

    net: Any = Net()
    mesh = {"data_parallel": init_device_mesh("cpu", (DEVICES,))}
    options = {"blocks": None, "param_dtype": None, "reduce_dtype": None, "reshard_after_forward": True}
    here = {"cpu_offload": False, "root_device": torch.device("cpu"), "device_mesh": mesh}
    shard(SimpleNamespace(**options, **here), net)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    weights, state = (
        sum(getattr(each, "_local_tensor", each).nbytes for each in some) for some in (net.parameters(), kept)
    )
    return {"weights": weights, "state": state}


def zero(*, stage: int, bf16: bool) -> dict[str, Any]:
    """Train two steps; return the same, and the optimizer's own weights."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    from lightning_eff.report.live_bytes import state_bytes
    from lightning_eff.strategy import _zero_config as zero_config
    from lightning_eff.strategy._zero_partitions import ZeroMemory

    zero_config.import_deepspeed("cpu")
    vars(coordinator)["assert_ints_same_as_other_ranks"] = lambda *_, **__: None  # the others are not there
    own: dict[str, Any] = {"reduce_bucket_size": 100_000}
    if stage == 3:
        own |= {"stage3_param_persistence_threshold": PERSISTENT, "stage3_prefetch_bucket_size": 0}
    config = zero_config.deepspeed_config(
        {"zero_optimization": own}, stage=stage, offload_optimizer=None, offload_parameters=None
    )
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    whole = config | {"gradient_clipping": 0.0, "bf16": {"enabled": bf16}}
    engine: Any = deepspeed.initialize(model=net, optimizer=optimizer, config=whole)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 16, dtype=torch.bfloat16 if bf16 else None)).float().sum())
        engine.step()
    inner = engine.optimizer
    if stage == 3:
        masters, weights = inner.fp32_partitioned_groups_flat, [p.ds_tensor for p in net.parameters()]
    else:
        masters, weights = inner.single_partition_of_fp32_groups, inner.bit16_groups_flat
    assert {each.data_ptr() for each in masters}.isdisjoint(each.data_ptr() for each in weights)
    held = {"weights": sum(each.nbytes for each in weights), "state": state_bytes(inner.optimizer)["cpu"]}
    kept = ZeroMemory.of(config, "bf16-mixed" if bf16 else "32-true")
    return held | {"own": sum(each.nbytes for each in masters), "scheme": vars(kept)}


def main() -> None:
    """Run every case that the standard input asks for."""
    for key, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "DS_ACCELERATOR": "cpu"}.items():
        os.environ[key] = value
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    warnings.simplefilter("ignore")
    cases: list[dict[str, Any]] = json.load(sys.stdin)
    found = [globals()[case.pop("by")](**case) for case in cases]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
