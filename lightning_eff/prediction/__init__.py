"""Two training steps of a Trainer on fake tensors, on any machine: what they would allocate.

`predict.py` runs them; the peak is what `EfficiencyReport` counts. The planner predicts recipes with it, and
`callbacks/gradient_checkpointing` chooses by it what to recompute. Below are torch's fake tensors
(`fakes.py`), the values that a training reads of them (`fake_values.py`) and the operators of CUDA
(`cuda_operators.py`). What a prediction must know of one technique is in that technique: `join_prediction`
and `assumptions` (the protocols of predict.py).
"""
