"""A run of the user's own, or a trace file of one: why its GPU idles.

This package never imports recording, assembly, build or execution.
"""
