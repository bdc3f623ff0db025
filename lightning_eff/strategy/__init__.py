"""Techniques that decide where a model's tensors live: `Trainer(strategy=...)`, one of them."""
