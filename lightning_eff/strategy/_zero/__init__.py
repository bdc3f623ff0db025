"""Parts of `strategy/deepspeed_zero`: DeepSpeed's config, what it refuses, and its partitions."""
