"""Findings: what makes a program slow, one detector a family, and the fixes as functions from trace to trace.

This package never imports session, profiling or dynamo, and constructs no `Capture`.
"""
