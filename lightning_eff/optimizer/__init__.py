"""Optimizers that no library offers as a `torch.optim.Optimizer`; most of them wrap existing optimizers."""
