"""Optimizers that no library offers as a `torch.optim.Optimizer`; most wrap existing optimizers."""
