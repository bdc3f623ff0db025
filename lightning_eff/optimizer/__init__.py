"""Optimizers that no library has as one: `torch.optim.Optimizer` in front, theirs behind."""
