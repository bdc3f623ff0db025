"""Tiled kernels and the layers made of them: tensors only, nothing of Lightning or Hydra."""
