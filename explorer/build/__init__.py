"""Kernel text becomes machine code here: the cache, the worker processes, the tuning trials, and what is
said to who waits for it.

This package never imports recording, assembly, execution or measure.
"""
