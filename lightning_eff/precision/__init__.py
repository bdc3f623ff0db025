"""Techniques that go into `Trainer(plugins=[...])`, one a run: number formats."""
