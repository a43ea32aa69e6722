"""CUDA kernels in Triton.

``kernels`` puts them together; ``decode`` is the attention of one new token, and ``codes`` how it
reads coded records.
"""

from qevict_kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
