"""Predict the memory of a training run on any machine, by running two of its steps on fake tensors.

`predict.py` runs the steps and counts the peak as `EfficiencyReport` does. The planner predicts recipes, and
`callbacks/gradient_checkpointing` predicts a step to choose the modules to recompute. `fakes.py` wraps
torch's fake tensors, `fake_values.py` provides values when training code reads fake tensors, and
`cuda_operators.py` imitates CUDA's operators. A technique that behaves differently while memory is predicted
has a method `join_prediction` or `assumptions` (protocols in predict.py).
"""
