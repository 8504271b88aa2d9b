"""What a trace is, and every function from traces to traces, to text or to numbers.

Nothing here runs a kernel, reads a clock or touches a GPU; nothing here imports the rest of tracefuse.
"""
