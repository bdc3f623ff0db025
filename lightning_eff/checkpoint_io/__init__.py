"""Techniques for `Trainer(plugins=[...])`, one per run: how checkpoints are written and read."""
