"""Parts of `callbacks/triton_gemm`: MLPs as one function, and how they are recognized."""
