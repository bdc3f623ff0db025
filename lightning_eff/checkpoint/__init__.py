"""Checkpoint files: atomic writes, verification before use, tensors and plain values only.

`checkpoint_io/durable` and the strategies write and read through `atomic_io.AtomicFiles`. The verbs find
checkpoints with `stored_weights`.
"""
