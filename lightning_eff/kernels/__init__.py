"""The tiled GEMM and the layer that uses it: tensors only, without Lightning or Hydra.

Which code decides who computes a GEMM, and with which tile: `dispatch.decide` and `Decision.config`.
To change the GEMM itself, read in this order:

    matmul.py         gemm, the public function, and torch's library
    operands.py       checks of shapes, dtypes and strides
    dispatch.py       the decision: torch's library or our kernels, and the tile config
    tile_configs.py   the configs that may be launched
    tiles.py          the cost model that ranks them
    operator.py       the torch operator: gradient, fake tensors, FLOPs
    launch.py         grids, strides, scratch memory
    gemm_kernels.py   the Triton kernels

Besides: linear.py (the layer), reference.py (the GEMM in float64), devices.py (peaks and sizes of GPUs),
known_layers.py (layers of published models).
"""
