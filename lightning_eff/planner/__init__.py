"""Predict the memory of a composed run before it starts, on one device or on many, and advise on it.

The verbs `plan` and `tune` call it, and so does `train` after an OOM error. Read in this order:

- `forecast.py`: predict (prediction/) a composed recipe, on a CPU, a GPU or many devices (`sharding.py`).
- `advice.py`: add techniques until a step fits; `longest.py`: lengthen sequences while it fits.
- `printing.py`: print the results as text and JSON; `out_of_memory.py`: explain an OOM error.

The overrides that advice tries are the techniques' own: `try_as` (core/technique.py).
"""
