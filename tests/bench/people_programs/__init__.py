"""Programs that people run and that nobody here wrote for a test: `PROGRAMS`, in files by kind."""

from importlib import import_module

from people_programs.made import PROGRAMS, Made, Program

__all__ = ["PROGRAMS", "Made", "Program"]

KINDS = ("losses", "steps", "graph", "layers", "functions", "networks", "generative", "packages", "language", "encoders",
    "seq2seq", "vision", "captions", "sound")  # fmt: skip
for _kind in KINDS:
    import_module(f"people_programs.{_kind}")
