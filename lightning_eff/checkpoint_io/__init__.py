"""Techniques for `Trainer(plugins=[...])` that write and read checkpoints; a run uses one of them."""
