"""What the driver and the workers of a run under Ray do; used by launch/ray.py alone."""
