"""Start the ranks of a run, stop them together after a signal, and end them together when one fails.

Read first: job.py (how this process was launched, and which settings contradict that), ranks.py (starts ranks
on this machine and names the rank that failed), stop.py (handles signals between two steps). Then ray.py,
ray_driver.py and ray_worker.py (Ray starts the ranks). The verbs and run.py call these modules; templates/
holds the job files of the verb `launch`.
"""
