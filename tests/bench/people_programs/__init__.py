"""Programs that people run and that nobody here wrote for a test: `PROGRAMS`, by kind one file each."""

from people_programs import (
    captions,
    encoders,
    functions,
    graph,
    language,
    losses,
    networks,
    seq2seq,
    sound,
    steps,
    vision,
)
from people_programs.made import PROGRAMS, Made, Program

__all__ = [
    "PROGRAMS",
    "Made",
    "Program",
    "captions",
    "encoders",
    "functions",
    "graph",
    "language",
    "losses",
    "networks",
    "seq2seq",
    "sound",
    "steps",
    "vision",
]
