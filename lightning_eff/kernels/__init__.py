"""The tiled GEMM and the layer that uses it: tensors only, without Lightning or Hydra.

Which code decides who computes a GEMM, and with which tile: `dispatch.decide` and `Decision.config`.
To change the GEMM itself, read in this order:

    matmul.py         gemm and gemm_logsumexp, the public functions
    operands.py       checks of shapes, dtypes and strides
    dispatch.py       the decision: torch's library or our kernels, and the tile config
    tile_configs.py   the configs that may be launched
    tiles.py          the cost model that ranks them
    operator.py       the torch operator: gradient, fake tensors, FLOPs
    launch.py         grids, strides, scratch memory
    gemm_kernels.py   the Triton kernels
    epilogue.py       what follows the product, in the kernels

Besides: linear.py (the layer), library.py (the GEMM by torch), reference.py (the GEMM in float64),
devices.py (peaks and sizes of GPUs), known_layers.py (layers of published models), language.py (imports
Triton), bench.py and gemm_problem.py (what `lightning-eff bench` measures).
"""
