"""Parts of `callbacks/tiled_conv`: the forward of a container that tiles its children."""
