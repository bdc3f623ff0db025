"""Private parts of `callbacks/tiled_loss`."""
