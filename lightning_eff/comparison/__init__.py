"""Measure techniques against a baseline: plan trials, run each in a process, build the table.

`compare` and `tune` use it, and `lightning_eff.compare` (modules.py) from Python. trial_plan.py plans trials,
rounds.py runs them by subprocess_trial.py, result_table.py and judgement.py evaluate them.
"""
