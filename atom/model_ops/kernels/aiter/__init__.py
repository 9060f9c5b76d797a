"""AMD's aiter kernels: one small adapter for each op, nothing else knows their conventions.

An adapter passes required arguments by position, as the kernels' own wrappers do, and optional
ones by name. What it takes for granted about a kernel and no signature says stands in its
docstring; the tests marked `gpu` check it against float64 references where there is an aiter.
"""
