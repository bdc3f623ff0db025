"""Predict the memory of a run before it starts, on one device or on many, and suggest ways to save memory.

The verbs `plan` and `tune` call this package, and so does `train` after an OOM error. Read in this order:

- `forecast.py` predicts a recipe on a CPU or a GPU, and `sharding.py` computes the memory on many devices.
- `advice.py` adds techniques until a step fits, and `longest.py` finds the longest sequence that fits.
- `printing.py` formats the results as text and JSON, and `out_of_memory.py` explains an OOM error.

Each technique states in `try_as` (core/technique.py) the overrides that `advice.py` tries.
"""
