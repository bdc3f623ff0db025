"""Checkpoint files with atomic writes, verification before use, and only tensors and plain values.

`checkpoint_io/durable` and the strategies write and read through `atomic_io.AtomicFiles`. The commands find
checkpoints with `stored_weights`.
"""
