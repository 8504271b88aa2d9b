"""Traces of the ranks of one job as one: clocks, matched collectives, who waited for whom, and why that one was late.

It imports how the trace of one run is read, and nothing that records, builds or runs a program."""
