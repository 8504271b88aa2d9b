"""A program is run once here, as it would run without us, and what it did is noted.

Every frame of ours that stands under a user's line is in this package.

This package never imports assembly, execution or config, and transforms no trace.
"""
