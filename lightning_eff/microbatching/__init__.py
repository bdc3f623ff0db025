"""One optimizer step from several passes: accumulation, micro-batches, and retries after OOM errors.

To change accumulation, read callbacks/gradient_accumulation.py (the number of batches per step),
lightning_loop.py (the loop that Lightning calls), window.py (scale factors) and splitting.py (counts of
samples).
To change micro-batches, read callbacks/micro_batch.py (options), micro_batch_runner.py (Lightning) or
fabric.py (hand-written loops), oom_retry.py (choice of the size, retries), snapshot.py (undoes a failed step)
and mean_check.py (rejects unsuitable losses).
uneven_ranks.py is about ranks with different numbers of batches.
"""
