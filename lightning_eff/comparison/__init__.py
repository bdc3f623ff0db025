"""Measure techniques against a baseline: plan trials, run each trial in its own process, build the table.

The verbs `compare` and `tune` use this package; so does the function `lightning_eff.compare` (modules.py).
trial_plan.py plans trials. rounds.py runs them with subprocess_trial.py. result_table.py and judgement.py
evaluate the results.
"""
