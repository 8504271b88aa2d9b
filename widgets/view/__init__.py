"""The one anywidget, its background tasks, and what a user takes away from it.

This package never imports notebook.
"""
