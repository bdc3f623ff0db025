"""Measure techniques against a baseline: plan trials, run each in a process, make the table."""
