"""Techniques for `Trainer(strategy=...)`, one per run: how a model's tensors are sharded and where they are.

A strategy's Trainer class and its Fabric class are in one file. To change FSDP2, read `fsdp2.py`, `_fsdp2.py`
(code shared by both classes), `_shared/checks.py`, `_shared/collectives.py` and, for Fabric,
`_shared/fabric_checkpoint.py`. Then read `checkpoint/full_state.py` and `checkpoint/sharded.py` (layouts of
checkpoints), `core/shards.py` and `core/model_surgery.py`. For ZeRO: `deepspeed_zero.py`, `_zero_config.py`
(DeepSpeed's keys, rejected settings), `_zero_engine.py` (optimizer, parameters, precision),
`_zero_partitions.py` (shards and their bytes), `_shared/` and `checkpoint/full_state.py`.

A LoRA run's checkpoint takes the same path under DDP, ZeRO and FSDP2. The strategy returns the state
(checkpoint/full_state.py), then a hook of the module (`AdapterCheckpointHooks` in
adapters/adapter_checkpoint.py) removes the base. Lightning's own sharding strategies save all of it.
"""
