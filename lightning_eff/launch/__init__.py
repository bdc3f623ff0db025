"""Start the ranks of a run, stop them together, and end them together when one fails.

Read first: job.py (how this process was launched, and settings that contradict it), ranks.py (starts ranks on
this machine and names the rank that failed), stop.py (signals, handled between two steps). Then ray.py,
ray_driver.py and ray_worker.py (Ray starts the ranks). The verbs and run.py call them; templates/ holds the
job files of the verb `launch`.
"""
