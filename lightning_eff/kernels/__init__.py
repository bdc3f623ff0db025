"""The tiled GEMM and the linear layer that uses it. Both work on tensors, without Lightning or Hydra.

`dispatch.find` and `dispatch.choose` decide which backend computes a GEMM, and with which tile. The modules
call each other in this order, from a layer's forward pass to the product of two tiles:

    linear.py         the layer: its three GEMMs
    matmul.py         gemm, the public function; the torch operator
    dispatch.py       choose torch's library or our kernels, and a config
    measure.py        measure which is faster, in the first call of a shape
    choices.py        store the measurements in a file for the next process
    launch.py         grids, strides, scratch memory
    gemm_kernels.py   the Triton kernels
    epilogue.py       adds C and the bias to a finished tile, and applies the activation

These modules also use operands.py (checks of shapes, dtypes, strides), tile_configs.py (the configs that can
be launched), tiles.py (the cost model that ranks and explains configs), library.py (torch's functions) and
devices.py (peaks and sizes of GPUs).
"""
