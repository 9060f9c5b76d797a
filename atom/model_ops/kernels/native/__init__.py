"""C++ kernels for CPUs, compiled at first use for the local processor.

Results of matrix products and attention are batch-invariant bit for bit, because the order of
summation is fixed: see `csrc/dot.h`, `csrc/amx.h` and `csrc/attention/attention.cpp`.
"""
