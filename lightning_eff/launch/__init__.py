"""Start the ranks of a run, stop all ranks together after a signal, and end all ranks when one fails.

Read first: job.py (detects the launcher, and rejects settings that contradict it), ranks.py (starts ranks on
this machine and names the rank that failed), stop.py (handles signals between two steps). Then read ray.py,
ray_driver.py and ray_worker.py, for ranks that Ray starts. The command's verbs and run.py call these modules.
templates/ holds the job files that the verb `launch` writes.
"""
