"""A capture and its measurements as a file that is data: JSON and raw bytes.

This package never imports diagnose, profiling or dynamo, and constructs no `Capture`.
"""
