"""Build a run's optimizer from its class: parameter groups, schedules, wrappers, a gradient check.

run.py and `callbacks/optimizer_choice` call `build.configure`; techniques in optimizer/ wrap others by
composite.py; `monitors/gradient_check` uses first_gradients.py.
"""
