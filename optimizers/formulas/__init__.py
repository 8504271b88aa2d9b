"""What ATen's operators compute, as formulas: elementary functions, activations, composites as several ops, and Philox.

A formula knows neither kernels nor layouts. This package never imports lowering, kernels or passes.
"""
