"""Programs that people run and that nobody here wrote for a test: `PROGRAMS`, by kind one file each."""

from people_programs import language, losses, steps
from people_programs.made import PROGRAMS, Made, Program

__all__ = ["PROGRAMS", "Made", "Program", "language", "losses", "steps"]
