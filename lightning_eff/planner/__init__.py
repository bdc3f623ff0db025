"""What a composed run would take, before it is started: memory of a device or of many, and advice.

`plan`, `tune` and the message of an out-of-memory error ask for it. Read in this order:

- `forecast.py`: predict (prediction/) a composed recipe, on a CPU, a GPU or many devices (`sharding.py`).
- `advice.py`: forecasts with further techniques, until a step fits; `longest.py`: with longer sequences.
- `printing.py`: all of these as text and JSON; `out_of_memory.py`: as an error.

The overrides that advice tries are the techniques' own: `try_as` (core/technique.py).
"""
