"""Techniques for `Trainer(strategy=...)`, one per run: where a model's tensors are.

To change FSDP2, read `fsdp2.py`, `_fsdp2/shard.py` (wrap the model), `_fsdp2/checkpoint.py` (its shards in
checkpoints), `_shared/checks.py`, `_shared/collectives.py`; `checkpoint/full_state.py`, `lazy_tensor.py`,
`sharded.py` and `sharded_write.py` (layouts of checkpoints); `core/shards.py` and `core/model_surgery.py`.
For ZeRO: `deepspeed_zero.py`, `_zero/`, `_shared/` and `checkpoint/full_state.py`. For both in a loop under
Fabric: `_fsdp2/fabric.py`, `_zero/fabric.py`, and `_shared/fabric_checkpoint.py` for save and load.

A LoRA run's checkpoint takes the same path under DDP, ZeRO and FSDP2: the strategy returns the state
(checkpoint/full_state.py), then a hook of the module (`AdapterCheckpointHooks` in
adapters/adapter_checkpoint.py) removes the base. Lightning's own sharding strategies save all of it.
"""
