"""Predict the memory of a training, on any machine: two steps of its Trainer on fake tensors.

`predict.py` runs the steps and counts the peak as `EfficiencyReport` does. The planner predicts recipes with
it, and `callbacks/gradient_checkpointing` uses it to choose the modules to recompute. `fakes.py` wraps
torch's fake tensors, `fake_values.py` provides the values that a training reads from them, and
`cuda_operators.py` has CUDA's operators. If a technique behaves differently in a prediction, its methods
`join_prediction` and `assumptions` say how (protocols in predict.py).
"""
