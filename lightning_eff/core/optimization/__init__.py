"""Build a run's optimizer from its class, with parameter groups, schedules, wrappers and a gradient check.

`callbacks/optimizer_choice`, which recipes use too, calls `build.configure`. Techniques in optimizer/ use
composite.py to wrap other optimizers; `monitors/gradient_check` uses first_gradients.py.
"""
