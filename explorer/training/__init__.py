"""A training step that runs and goes home: forward, backward and update as one call, on the live model and optimizer.

It never imports what measures or shows, nor the front doors.
"""
