"""Optimizers that no library has as one `torch.optim.Optimizer`: wrappers around existing ones."""
