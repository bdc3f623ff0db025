"""Learning-rate schedules that can be resumed with a different number of steps."""
