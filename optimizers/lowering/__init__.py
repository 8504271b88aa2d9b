"""What each ATen op is inside a kernel: index algebra, expressions, reductions, gathers and layouts.

This package never imports kernels or a pass.
"""
