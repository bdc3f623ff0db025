"""Techniques for `Trainer(plugins=[...])`, at most one in a run: number formats."""
