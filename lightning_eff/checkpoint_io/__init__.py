"""Techniques for `Trainer(plugins=[...])` that write and read checkpoints."""
