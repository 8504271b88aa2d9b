"""What a finding is, what a detector may look at, and the table of all kinds of findings.

This package never imports session, profiling or dynamo, and detects nothing itself.
"""
