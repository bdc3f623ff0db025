"""Parts of `strategy/fsdp2`: dividing a model, and the state of its shards."""
