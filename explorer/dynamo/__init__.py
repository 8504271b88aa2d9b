"""AOTAutograd's conventions: its joint graph becomes a `Trace`, and compiled halves go back to it.

This package never imports measure, timeline, tables, diagnose or session.
"""
