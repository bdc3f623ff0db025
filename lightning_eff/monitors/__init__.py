"""Callbacks that observe a run and change nothing in its training."""
