"""What a composed run would take, before it is started: memory of a device or of many, and advice.

`plan`, `tune` and the message of an out-of-memory error ask for it. Read in this order:

- `prediction.py`: run two steps of a Trainer on fake tensors; the peak is what `EfficiencyReport` counts.
- `forecast.py`: the same for a composed recipe, on a CPU, a GPU or many devices (`sharding.py`).
- `advice.py`: forecasts with further techniques, until a step fits; `longest.py`: with longer sequences.
- `printing.py`: all of these as text and JSON; `out_of_memory.py`: as an error.

Below `prediction.py` are torch's fake tensors (`fakes.py`), the values that a training reads of them
(`fake_values.py`) and the operators of CUDA (`cuda_operators.py`). What a prediction must know of one
technique is in that technique: `join_prediction` and `assumptions` (the protocols of prediction.py), and the
overrides that advice tries, `try_as` (core/technique.py).
"""
