"""CUDA kernels in Triton.

``kernels`` puts them together: ``memory`` moves tokens and copies, ``quantize`` writes codes and
rebuilds windows, ``decode`` is the attention of one new token and ``extend`` that of a chunk.
``codes`` is how decode reads coded records, ``records`` how the others do.
"""

from qevict_kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
