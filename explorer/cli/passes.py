"""`tracefuse passes`: each pass in pipeline order, what it does, and its options with their defaults."""

from __future__ import annotations

import argparse
import textwrap

from tracefuse.config.configuration import MORE_OPTIONS
from tracefuse.config.names import PASSES
from tracefuse.config.pass_options import PassOption, written


def show_passes(arguments: argparse.Namespace) -> None:
    """Print the passes; the options of `remat` are those that `--remat-option NAME=VALUE` and `remat_options` take, those of
    `overlap` what `--overlap NAME=VALUE` takes."""
    for name, does in PASSES.items():
        print(_filled(f"{name:<10} {does}", 11))
        if name in MORE_OPTIONS:
            options = (option for option in MORE_OPTIONS[name][1].values() if option.is_text)
            print("\n".join(_filled(f"{'':11}{_line(option)}", 15) for option in options))


def _line(option: PassOption) -> str:
    default = str(option.default) if option.default is False else written(option.default) or "none"
    return f"{option.name}={default}: {option.help}"


def _filled(text: str, indent: int) -> str:
    return textwrap.fill(text, 120, subsequent_indent=" " * indent, break_on_hyphens=False)
