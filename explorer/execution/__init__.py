"""Programs that run: the replay that is the oracle, the exported module, CUDA graphs, and agreement with the run.

This package never imports measure, timeline or config, and reads no clock.
"""
