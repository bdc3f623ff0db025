"""How an optimizer step is made: accumulation, micro-batches, and retries after out-of-memory errors.

To change accumulation: callbacks/gradient_accumulation.py (number of batches), lightning_loop.py (what
Lightning calls), window.py (the scale factors), splitting.py (what counts as a sample).
To change micro-batches: callbacks/micro_batch.py, micro_batch_runner.py (under Lightning) or fabric.py
(without), oom_retry.py (the size, second attempts, `find`), snapshot.py (undoing), mean_check.py (rejected
losses). Ranks with different numbers of batches: uneven_ranks.py.
"""
