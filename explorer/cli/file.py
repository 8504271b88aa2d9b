"""`tracefuse FILE`: run a script and show what it computed, or show a session file without running anything."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracefuse.cli.choices import changes_of, check_folder, configuration
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import PASS_OPTIONS, SCRIPT_OPTIONS, Option, values
from tracefuse.cli.globs import GlobCheck
from tracefuse.cli.script import run_script
from tracefuse.config.names import SESSION
from tracefuse.device.target import target
from tracefuse.errors import MeasureError, NotSupported, OptionError
from tracefuse.findings.finding import SEVERITIES, Finding
from tracefuse.findings.ignored import ignored_text
from tracefuse.loaded import load
from tracefuse.measure.peers import check_names
from tracefuse.measure.timing import UNASKED_S
from tracefuse.measure.tried import Tried, try_variants
from tracefuse.variant import NOTHING_TUNED, Variant

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer

_RUNNING = ("try", "measure", "train_all", "step", "budget_s", "cuda_graph", "tune", "peer")
_WRITING = ("html", "json", "session")


ASK = "--budget SECONDS measures, however long a round takes"
FOUND = 3
"""The exit status of `--fail-on` where there is a finding of that severity."""


def show_file(arguments: argparse.Namespace, of_script: Sequence[str]) -> int:
    """Show the file that `arguments` name, whose own ones are `of_script`, and write what they ask for; the exit status.

    Raises `OptionError` before anything runs for what cannot be done, and whatever running, measuring and writing raise;
    `SystemExit` where the script ends with another status than 0.
    """
    path, chosen, status = Path(arguments.file), values(arguments, SCRIPT_OPTIONS), 0
    priced_for = target(chosen["target"])
    is_session = path.suffix == SESSION
    _check(arguments, chosen, is_session, of_script)
    next_step = Stages(total=1 if arguments.no_measure or is_session else 2).next
    if is_session:
        next_step(f"reading {path}")
        capture = load(path)
    else:
        next_step(f"running {' '.join([str(path), *of_script])}")
        with GlobCheck(_globs(arguments, chosen), lambda: vars(sys.modules["__main__"]), lambda said: _tell([said])):
            capture, remarks, status = run_script(path, of_script, chosen["train_all"], chosen["step"])
        _tell(remarks)
    config = configuration(arguments)
    measured = [one for one, _ in capture.measurements.timings] if is_session else []
    if measured and config not in measured and not _given(arguments, PASS_OPTIONS):
        config = measured[-1]  # what a session is opened for, where that is not the default
    variant = capture.variant(config).check()
    if chosen["tune"] and not variant.runs_triton:
        _tell([f"{NOTHING_TUNED}; leave out --tune"])
        chosen["tune"] = False
    _tell([f"what is modelled is priced for {priced_for}"])
    explorer = open_view(variant, chosen)
    blocked = explorer.payload["blocked"]
    if chosen["measure"] and not is_session and not blocked:
        next_step("measuring the captured trace beside the optimised one")
        is_asked = variant.runs_triton or arguments.budget_s is not None
        explorer.measure(math.inf if is_asked else UNASKED_S)
        if explorer.gave_up:
            _tell([f"not measured: that takes longer than {UNASKED_S:.0f} s here; {ASK}"])
    failed = explorer.status["error"]
    print(explorer, flush=True)
    if blocked and not is_session:
        _tell([f"nothing was measured: {blocked}"])
    found = variant.findings()
    _tell(filter(None, [ignored_text(found.ignored)]))
    tried = (
        []
        if blocked or failed
        else try_variants(variant, list(map(changes_of, chosen["try"])), budget_s=chosen["budget_s"])
    )
    for one in tried:
        print(one, flush=True)
    _write(explorer, chosen, tried)
    if failed:  # what was captured is shown and written all the same
        raise MeasureError(f"the measurement failed: {failed['message']}")
    return FOUND if _is_found(found, chosen["fail_on"]) else status


def _globs(arguments: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, list[str]]:
    """By flag, the globs that are to match something of what the script runs."""
    tried = [changes_of(one) for one in chosen["try"]]
    asked = [vars(arguments), *tried]
    return {
        f"--{name}": [glob for one in asked for glob in _listed(one.get(name))]
        for name in ("freeze", "save", "recompute")
    }


def _listed(given: Any) -> Sequence[str]:
    return given if isinstance(given, (list, tuple)) else ()


def _is_found(findings: Iterable[Finding], least: str | None) -> bool:
    """Whether there is a finding that no pass mends of at least that severity, and say which."""
    grave = SEVERITIES[: SEVERITIES.index(least) + 1] if least else ()  # type: ignore[arg-type]
    found = [one for one in findings if one.severity in grave and not one.is_mended]
    _tell(f"--fail-on {least}: {one.severity} [{one.id}] {one.title}, at {one.source or 'no line'}" for one in found)
    return bool(found)


def _tell(remarks: Iterable[str]) -> None:
    for remark in remarks:
        print(f"tracefuse: {remark}", file=sys.stderr, flush=True)


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
    if chosen["step"] is not None and chosen["train_all"]:
        raise OptionError("--train-all adds up gradients of the whole script, and --step shows one step: leave out one")
    if chosen["cuda_graph"] and not torch.cuda.is_available():
        raise NotSupported("--cuda-graph needs a CUDA GPU, and torch sees none on this machine: leave it out")
    check_names(chosen["peer"])
    for name in _WRITING:
        check_folder(name, chosen[name])
    if chosen["session"] and Path(chosen["session"]).suffix != SESSION:
        raise OptionError(
            f"--session {chosen['session']} does not end in {SESSION}: name it {chosen['session']}{SESSION}"
        )
    for one in chosen["try"]:
        changes_of(one)
    try:
        configuration(arguments)
    except OptionError as error:
        if is_session or not (arguments.with_pass or arguments.without_pass):
            raise
        _tell([f"{str(error).rstrip('.')}. The script may register such a pass, so that it runs first"])


def _given(arguments: argparse.Namespace, options: Sequence[Option]) -> list[str]:
    """The flags of those of `options` that were given."""
    on = [(o.flags[0], getattr(arguments, o.name, None)) for o in options if o.flags]
    off = [(o.off_flag, getattr(arguments, f"no_{o.name}", None)) for o in options if o.off_flag]
    return [flag for flag, value in (*on, *off) if value]


def open_view(variant: Variant, chosen: dict[str, Any]) -> Explorer:
    """The view of `variant`, which is also what measures, prints and is written. The room above is opened only here."""
    from tracefuse.widgets.view.explorer import Explorer

    return Explorer(variant, "c", chosen["budget_s"], chosen["cuda_graph"], chosen["tune"], chosen["peer"])


def _write(explorer: Explorer, chosen: dict[str, Any], tried: Sequence[Tried]) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "html": explorer.save_html,
        "json": lambda path: explorer.save_report(path, tried),
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
