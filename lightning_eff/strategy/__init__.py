"""Techniques for `Trainer(strategy=...)`, one per run: where a model's tensors are.

A strategy's class for the Trainer and the one for Fabric are in one file. To change FSDP2, read `fsdp2.py`,
`_fsdp2.py` (what both classes do alike), `_shared/checks.py`, `_shared/collectives.py` and, for Fabric,
`_shared/fabric_checkpoint.py`; `checkpoint/full_state.py` and `checkpoint/sharded.py` (layouts of
checkpoints); `core/shards.py` and `core/model_surgery.py`. For ZeRO: `deepspeed_zero.py`, `_zero_config.py`
(DeepSpeed's keys, what is rejected), `_zero_engine.py` (optimizer, parameters, precision),
`_zero_partitions.py` (shards and their bytes), `_shared/` and `checkpoint/full_state.py`.

A LoRA run's checkpoint takes the same path under DDP, ZeRO and FSDP2: the strategy returns the state
(checkpoint/full_state.py), then a hook of the module (`AdapterCheckpointHooks` in
adapters/adapter_checkpoint.py) removes the base. Lightning's own sharding strategies save all of it.
"""
