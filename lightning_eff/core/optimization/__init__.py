"""Build a run's optimizer from its class: parameter groups, schedules, wrappers, a gradient check."""
