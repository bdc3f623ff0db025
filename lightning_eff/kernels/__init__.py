"""The tiled GEMM and the layer that uses it: tensors only, without Lightning or Hydra.

Which code decides who computes a GEMM, and with which tile: `dispatch.find` and `dispatch.choose`. From a
layer's forward to the product of two tiles, in the order of the calls:

    linear.py         the layer: its three GEMMs
    matmul.py         gemm, the public function; the torch operator
    dispatch.py       who computes: torch's library or our kernels, with which config
    measure.py        the first call of a shape: which of them is faster
    choices.py        what was measured, in a file for the next start
    launch.py         grids, strides, scratch memory
    gemm_kernels.py   the Triton kernels
    epilogue.py       what they compute on a finished tile

What these use: operands.py (checks of shapes, dtypes, strides), tile_configs.py (the configs that may be
launched), tiles.py (the cost model that ranks and explains them), library.py (torch's functions), devices.py
(peaks and sizes of GPUs).
"""
