"""What is known of a program as rows: by module, kind of work, reason and byte.

This package never imports diagnose, session or profiling.
"""
