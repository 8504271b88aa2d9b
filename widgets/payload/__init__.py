"""The wire format: a variant and what was measured of it, as JSON for the front end.

This package never imports view, notebook, anywidget or IPython.
"""
