"""Compute one optimizer step in several passes: accumulation, micro-batches, retries after OOM errors.

To change accumulation, read callbacks/gradient_accumulation.py (the number of batches per step),
lightning_loop.py (the loop that Lightning calls), window.py (scale factors) and splitting.py (counts of
samples).
To change micro-batches, read callbacks/micro_batch.py (options), then micro_batch_runner.py (for a Trainer)
or fabric.py (for hand-written loops). Then read oom_retry.py (choice of the size, retries), snapshot.py
(undoes a failed step) and mean_check.py (rejects losses that are not a mean over samples).
uneven_ranks.py handles ranks with different numbers of batches.
"""
