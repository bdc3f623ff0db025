"""Parts of `strategy/fsdp2`: wrapping a model, and its shards in checkpoints."""
