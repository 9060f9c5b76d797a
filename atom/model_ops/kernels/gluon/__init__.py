"""Kernels in Gluon, for AMD's matrix units; imported only where one is chosen."""
