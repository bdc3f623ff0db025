"""Start the ranks of a run, stop them together, and end them together when one fails.

Read first: job.py (how this process was launched, and what contradicts that), ranks.py (start ranks on this
machine and name the one that failed), stop.py (signals, between two steps). Then ray.py, ray_driver.py and
ray_worker.py (Ray starts the ranks). The verbs and run.py call them; templates/ has the job
files of `launch`.
"""
