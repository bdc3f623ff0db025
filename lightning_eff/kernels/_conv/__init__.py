"""Parts of `kernels/conv`: windows of layers, layers on a tile, the grid of tiles, the autograd function."""
