"""Fake tensors: how one is made, and what an operator yields on them.

This package never imports passes, lowering or kernels.
"""
