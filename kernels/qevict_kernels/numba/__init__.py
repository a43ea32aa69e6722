"""CPU kernels: numba drivers around inner blocks emitted as LLVM IR."""
