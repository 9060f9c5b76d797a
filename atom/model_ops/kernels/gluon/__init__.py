"""Gluon kernels for AMD matrix cores; imported only when selected."""
