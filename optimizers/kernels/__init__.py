"""A kernel as data with a key, the jitted functions that it calls, and its Triton text.

This package never imports a pass.
"""
