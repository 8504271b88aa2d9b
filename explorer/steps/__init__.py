"""Which part of a run is one training step, and one step of many recorded.

It watches torch's optimizers step, and imports how programs are recorded, no trace, and nothing that runs or measures one.
"""
