"""CPU kernels: numba drivers around inner blocks emitted as LLVM IR.

``kernels`` checks arguments; ``decode``, ``extend``, ``quantize`` and ``store`` are drivers in
plain numba; ``blocks`` and ``windows`` emit what runs inside a window, through ``ir``; ``spec``
carries the geometry into compile time; ``parallel`` runs a driver on torch's OpenMP team.
"""

from qevict_kernels.numba.kernels import NumbaKernels

__all__ = ["NumbaKernels"]
