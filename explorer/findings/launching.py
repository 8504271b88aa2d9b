"""What the host pays to launch an op: measured once, and the same for all detectors."""

from __future__ import annotations

# `x * 2 + y` takes 14.3 µs (tests/bench/results/launch_h100.json).
HOST_US = 7.2
MEASURED = f"the host's {HOST_US} µs per op was measured on an H100's"
