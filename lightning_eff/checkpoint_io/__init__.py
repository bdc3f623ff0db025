"""Techniques that go into `Trainer(plugins=[...])`, one a run: how checkpoints are written and read."""
