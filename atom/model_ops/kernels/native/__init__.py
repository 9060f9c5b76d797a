"""C++ kernels for CPUs, compiled on first use for the processor at hand.

Matrix products and attention give a row the same bits in any batch: see `csrc/dot.h` and
`csrc/attention.cpp` for the orders of summation that this rests on.
"""
