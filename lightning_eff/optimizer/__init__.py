"""Optimizers that no library offers as one `torch.optim.Optimizer`; most of them wrap existing ones."""
