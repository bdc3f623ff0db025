"""Learning-rate schedules that no library has in a resumable form."""
