"""Checkpoint files: atomic writes, verified before use, only tensors and plain values."""
