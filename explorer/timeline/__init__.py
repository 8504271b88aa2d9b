"""One profiled replay, op by op: its events, lanes, gaps and their causes.

This package never imports tables, diagnose, session or profiling.
"""
