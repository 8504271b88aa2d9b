"""Times as data: clocks, rounds, intervals, peers and the machine's peaks.

This package never imports timeline, tables, diagnose or session.
"""
