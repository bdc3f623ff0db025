"""Learning-rate schedules that can be resumed with another number of steps."""
