"""Parts of `strategy/deepspeed_zero`: checks, config, optimizer, parameters, partitions, memory."""
