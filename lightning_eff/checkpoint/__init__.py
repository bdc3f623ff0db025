"""Checkpoint files that are written atomically, verified before use, and limited to tensors and plain values.

`checkpoint_io/durable` and the strategies write and read through `atomic_io.AtomicFiles`. The commands find
checkpoints with `stored_weights`.
"""
