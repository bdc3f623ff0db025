"""Parts of `callbacks/tiled_mlp`: tiles of a module's tokens, and the test that a module is token-wise."""
