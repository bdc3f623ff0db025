"""One optimizer step from several passes: accumulation, micro-batches, and retries after OOM errors.

Where to change accumulation: callbacks/gradient_accumulation.py sets the number of batches per step,
lightning_loop.py is the loop that Lightning calls, window.py has the scale factors, and splitting.py counts
samples.
Where to change micro-batches: callbacks/micro_batch.py has the options, micro_batch_runner.py runs under
Lightning and fabric.py without it, oom_retry.py chooses the size and retries, snapshot.py undoes a failed
step, and mean_check.py rejects unsuitable losses.
Ranks with different numbers of batches: uneven_ranks.py.
"""
