"""Measuring techniques against each other: which trials, each in a process, and the table they make."""
