"""What this machine is and can do: its versions, GPU, clocks, states of dropout and cuDNN's packed attention.

This package never imports recording, assembly, build, execution or anything above them.
"""
