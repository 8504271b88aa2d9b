"""What an op costs, told by looking at it: bytes, FLOPs, the roofline and datasheets of GPUs.

This package never imports a pass, lowering or kernels.
"""
