"""What stands between an optimizer's class and a training: groups, schedules, facades, first gradients."""
