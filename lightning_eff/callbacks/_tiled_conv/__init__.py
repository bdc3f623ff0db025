"""Parts of `callbacks/tiled_conv`: which children are local layers, and the forward that tiles them."""
