"""Start the ranks of a run, stop all ranks together after a signal, and end all ranks when one fails.

Read job.py first, which detects the launcher and rejects settings that contradict it. Then read ranks.py
(starts ranks on this machine and names the rank that failed) and stop.py (handles signals between two steps).
For ranks that Ray starts, read ray.py, ray_driver.py and ray_worker.py. The command's verbs and run.py call
these modules. templates/ contains the job files that the verb `launch` writes.
"""
