"""Rank 0 of four that are not there: what DeepSpeed and FSDP2 really hold and send, as JSON.

Collectives of a fake process group move nothing, but have their sizes. A process of its own, since a group
and DeepSpeed's engine stay behind.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = 4
TIMES = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}
BUCKET = 100_000
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


class Sent(TorchDispatchMode):
    """Count the bytes that a ring would send for the collectives inside; single numbers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.numel() > 1]
            times = next((times for word, times in TIMES.items() if word in name), 0)
            whole = max((each.nbytes for each in tensors), default=0)
            self.num_bytes["sent"] += times * whole * (DEVICES - 1) // DEVICES
        return func(*args, **(kwargs or {}))


def fsdp2(*, reshard: bool, bf16: bool, micro_batches: int) -> dict[str, int]:
    """Train three steps; return bytes of weights, of state, and sent in the last."""
    from lightning_eff.strategy._fsdp2 import shard

    net: Any = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else None
    mesh = init_device_mesh("cpu", (DEVICES,))
    shard.shard(net, mesh, policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(net.parameters())
    sent = Sent()
    for _ in range(3):
        sent = Sent()
        with sent:
            for index in range(micro_batches):
                net.set_requires_gradient_sync(index == micro_batches - 1)
                net(torch.randn(2, 16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    weights, state = (
        sum(getattr(each, "_local_tensor", each).nbytes for each in some) for some in (net.parameters(), kept)
    )
    return {"weights": weights, "state": state} | sent.num_bytes


def zero(*, stage: int, bf16: bool, micro_batches: int, reuse: int = 10**9) -> dict[str, Any]:
    """Train five steps, of which DeepSpeed needs some to learn the model's order; return the same."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    from lightning_eff.report.live_bytes import state_bytes
    from lightning_eff.strategy._zero import checks, zero_config

    checks.disable_shared_memory_transport()
    vars(coordinator)["assert_ints_same_as_other_ranks"] = lambda *_, **__: None  # the others are not there
    own: dict[str, Any] = {"reduce_bucket_size": BUCKET}
    if stage == 3:
        own |= {"stage3_param_persistence_threshold": PERSISTENT, "stage3_max_reuse_distance": reuse}
        own |= {"stage3_prefetch_bucket_size": 0}
    config = zero_config.deepspeed_config(
        {"zero_optimization": own},
        stage=stage,
        offload_optimizer=None,
        offload_parameters=None,
    )
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    whole = config | {"gradient_clipping": 0.0, "bf16": {"enabled": bf16}}
    engine: Any = deepspeed.initialize(model=net, optimizer=optimizer, config=whole)[0]
    sent = Sent()
    for _ in range(5):
        sent = Sent()
        with sent:
            for _ in range(micro_batches):
                x = torch.randn(2, 16, dtype=torch.bfloat16 if bf16 else torch.float32)
                engine.backward(engine(x).float().sum())
            engine.step()
    inner = engine.optimizer
    if stage == 3:
        masters, weights = inner.fp32_partitioned_groups_flat, [p.ds_tensor for p in net.parameters()]
    else:
        masters, weights = inner.single_partition_of_fp32_groups, inner.bit16_groups_flat
    own_bytes = 0 if stage == 3 and not bf16 else sum(each.nbytes for each in masters)
    held = {"weights": sum(each.nbytes for each in weights), "state": state_bytes(inner.optimizer)["cpu"]}
    kept = zero_config.scheme(config, "bf16-mixed" if bf16 else "32-true")
    return held | {"own": own_bytes, "scheme": vars(kept)} | sent.num_bytes


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
