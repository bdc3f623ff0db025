"""Private parts of `kernels/cross_entropy`."""
