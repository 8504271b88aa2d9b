"""`tracefuse FILE`: run a script and show what it computed, or show a session file without running anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracefuse.cli.flags import PASS_OPTIONS, SCRIPT_OPTIONS, Option, configuration, values
from tracefuse.cli.script import run_script
from tracefuse.config.configuration import Config
from tracefuse.errors import MeasureError, NotSupported, OptionError
from tracefuse.measure.peers import check_names
from tracefuse.session.files import load
from tracefuse.variant import Variant

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer

SESSION = ".tfz"
HELP = f"""\
FILE.py is run as `python FILE.py ARGUMENTS` would run it. What it computes from the first module that it calls, or the first
op that autograd records, to its last line is shown as one trace: its modules, what each pass does to it, and measured times. A
script that loops over training steps marks the one that it wants to see:

    with tracefuse.capture() as c:
        loss = model(x); loss.backward()

Then that is shown, the last one if there are several, and nothing else is recorded. FILE{SESSION} is a session, which
`--session` and `c.save(path)` write: it is shown with the times that were measured where it was saved, and nothing runs.

The exit status is that of the script where it fails, 1 for an error that tracefuse explains, 2 for bad usage.

commands:
  tracefuse demo    capture a GPT's training step, optimise, time and export it
  tracefuse cache   show or clear the disk cache of generated kernels
  tracefuse peaks   print the measured peaks of the GPU or CPU
"""

_RUNNING = ("measure", "train_all", "budget", "cuda_graph", "tune", "peer")
_WRITING = ("html", "json", "session")


def show_file(arguments: argparse.Namespace, of_script: Sequence[str], next_step: Callable[[str], None]) -> None:
    """Show the file that `arguments` name, whose own ones are `of_script`, and write what they ask for.

    Raises `OptionError` before anything runs for what cannot be done, and whatever running, measuring and writing raise;
    `SystemExit` where the script ends with another status than 0.
    """
    path, chosen = Path(arguments.file), values(arguments, SCRIPT_OPTIONS)
    is_session = path.suffix == SESSION
    _check(arguments, chosen, is_session, of_script)
    remarks: list[str] = []
    if is_session:
        next_step(f"reading {path}")
        capture = load(path)
    else:
        next_step(f"running {' '.join([str(path), *of_script])}")
        capture, remarks = run_script(path, of_script, chosen["train_all"])
    config = configuration(arguments)
    if is_session and not _given(arguments, PASS_OPTIONS):
        config = _measured_last(capture.measurements.timings, config)
    explorer = open_view(capture.variant(config).check(), chosen)
    blocked = explorer.payload["blocked"]
    if chosen["measure"] and not is_session and not blocked:
        next_step("measuring the captured trace beside the optimised one")
        _measure(explorer)
    print(explorer, flush=True)
    if blocked and not is_session:
        remarks.append("nothing was measured: mark one training step by `with tracefuse.capture():` in the script")
    for remark in remarks:
        print(f"tracefuse: {remark}", file=sys.stderr)
    _write(explorer, chosen)


def _check(arguments: argparse.Namespace, chosen: dict[str, Any], is_session: bool, of_script: Sequence[str]) -> None:
    """Raise `OptionError` or `NotSupported` for what would fail only after the script has run."""
    if is_session and (given := _given(arguments, [o for o in SCRIPT_OPTIONS if o.name in _RUNNING])):
        raise OptionError(f"{given[0]} is for running a script, and {arguments.file} is only shown: leave it out")
    if is_session and of_script:
        raise OptionError(
            f"{arguments.file} takes no arguments, since it is only shown: leave out {' '.join(of_script)}"
        )
    if chosen["inputs"] and not chosen["session"]:
        raise OptionError(f"--inputs says what the session file holds: add --session FILE{SESSION}, or leave it out")
    if chosen["cuda_graph"] and not torch.cuda.is_available():
        raise NotSupported("--cuda-graph needs a CUDA GPU, and torch sees none on this machine: leave it out")
    check_names(chosen["peer"])
    for name in _WRITING:
        if chosen[name] and not Path(chosen[name]).resolve().parent.is_dir():
            raise OptionError(f"--{name} {chosen[name]}: there is no such directory: create it, or name another one")
    if chosen["session"] and Path(chosen["session"]).suffix != SESSION:
        raise OptionError(
            f"--session {chosen['session']} does not end in {SESSION}: name it {chosen['session']}{SESSION}"
        )
    if not (arguments.with_pass or arguments.without_pass):  # those may be passes that the script registers
        configuration(arguments)


def _given(arguments: argparse.Namespace, options: Sequence[Option]) -> list[str]:
    """The flags of those of `options` that were given."""
    on = [(o.flags[0], getattr(arguments, o.name, None)) for o in options if o.flags]
    off = [(o.off_flag, getattr(arguments, f"no_{o.name}", None)) for o in options if o.off_flag]
    return [flag for flag, value in (*on, *off) if value]


def _measured_last(timings: Iterable[tuple[Config, Config | None]], default: Config) -> Config:
    """What a session is opened for: the default if it was measured or nothing was, else what was measured last."""
    measured = [config for config, _ in timings]
    return default if default in measured or not measured else measured[-1]


def open_view(variant: Variant, chosen: dict[str, Any]) -> Explorer:
    """The view of `variant`, which is also what measures, prints and is written. The room above is opened only here."""
    from tracefuse.widgets.view.explorer import Explorer

    return Explorer(variant, "c", chosen["budget"], chosen["cuda_graph"], chosen["tune"], chosen["peer"])


def _measure(explorer: Explorer) -> None:
    explorer.measure()
    if error := explorer.status["error"]:
        raise MeasureError(error["message"])


def _write(explorer: Explorer, chosen: dict[str, Any]) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "html": explorer.save_html,
        "json": explorer.save_report,
        "session": lambda path: explorer.variant.capture.save(path, chosen["inputs"]),
    }
    for name, write in writers.items():
        if chosen[name]:
            try:
                write(Path(chosen[name]))
            except OSError as error:
                raise OptionError(
                    f"--{name} {chosen[name]} cannot be written ({error.strerror}): name another file"
                ) from None
            print(f"{name.ljust(7)}  {chosen[name]}")
