"""Techniques for `Trainer(strategy=...)` that shard a model's tensors across devices.

A strategy's Trainer class and its Fabric class are in one file. Read these files before a change:

- FSDP2: `fsdp2.py`, `_fsdp2.py` (code shared by both classes), `_shared/checks.py`, `_shared/collectives.py`
  and, for Fabric, `_shared/fabric_checkpoint.py`. Then read `checkpoint/full_state.py` and
  `checkpoint/sharded.py` (layouts of checkpoints), `core/shards.py` and `core/model_surgery.py`.
- ZeRO: `deepspeed_zero.py`, `_zero_config.py` (DeepSpeed's keys, rejected settings), `_zero_engine.py`
  (optimizer, parameters, precision), `_zero_partitions.py` (shards and their bytes), `_shared/` and
  `checkpoint/full_state.py`.

LoRA checkpoints are written in the same way under DDP, ZeRO and FSDP2. The strategy returns the full state
(checkpoint/full_state.py), and a hook of the module (`AdapterCheckpointHooks` in
adapters/adapter_checkpoint.py) removes the frozen base weights. Lightning's own sharding strategies also save
the base weights.
"""
