"""A trace in other formats: JSON that can be read back, DOT and Model Explorer's JSON.

This package imports no other package below `optimizers`.
"""
