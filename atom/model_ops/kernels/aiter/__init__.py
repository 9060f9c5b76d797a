"""Adapters to AMD's aiter kernels, one per op; nothing else depends on their conventions.

Required arguments are passed by position, as aiter's own wrappers do, optional ones by name.
Assumptions about a kernel that its signature does not show are in the adapter's docstring
("Assumes"); tests marked `gpu` check them against float64 references where aiter is installed.
"""
