"""A recording becomes a functional `Trace` with names, phases and roles here, and what a trace cannot hold is told.

This package never imports execution, config or measure.
"""
