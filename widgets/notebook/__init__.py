"""What IPython sees: the magic, the transformed cell, tracebacks and rich display.

Nothing imports this package but `load_ipython_extension`.
"""
