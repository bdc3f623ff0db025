"""Build a run's optimizer from its class: parameter groups, schedules, wrappers, a gradient check.

`callbacks/optimizer_choice`, which recipes use too, calls `build.configure`. Techniques in optimizer/ wrap
others by composite.py; `monitors/gradient_check` uses first_gradients.py.
"""
