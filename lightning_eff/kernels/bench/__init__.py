"""Timing and compiling the kernels: what the command `bench` runs."""
