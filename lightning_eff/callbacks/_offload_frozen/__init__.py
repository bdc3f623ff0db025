"""Parts of `callbacks/offload_frozen`: weights on the host, their copies on the device, hooks of blocks."""
