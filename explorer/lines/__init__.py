"""Lines of the user's program as Python reads them: the statements that they are parts of, and what those bind and add.

This package never imports another one of the explorer, and runs nothing.
"""
