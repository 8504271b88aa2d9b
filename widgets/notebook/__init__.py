"""IPython sees of tracefuse the magic, the cell that it transforms, tracebacks and rich display.

Nothing imports this package but `load_ipython_extension`.
"""
