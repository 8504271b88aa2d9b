"""Kernel text becomes machine code here: the cache, the worker processes and the tuning trials.

This package never imports recording, assembly, execution or measure.
"""
