"""`%%tracefuse` records a cell, and `%tracefuse` an expression.

The cell runs once, as it would without the magic: an input transformer and an AST transformer
(`tracefuse.widgets.notebook.cell`) turn it into `with TracedCell(ARGS): ...`, and keep no state between cells. Awaits stay at
the top level, and the value of the last expression is handed to IPython after the block, which displays it.

If the cell raises, the error leaves as it is, no view is shown and nothing is assigned; where the name of `-o` is in use, it
is said that it keeps its value.
"""

from __future__ import annotations

import keyword
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import argument
from IPython.display import display
from IPython.utils.process import arg_split

from tracefuse.cli.choices import check_folder, configuration
from tracefuse.cli.flags import MAGIC_OPTIONS, PASS_OPTIONS, magic_arguments, values
from tracefuse.config.configuration import Config
from tracefuse.device.target import target
from tracefuse.errors import OptionError
from tracefuse.measure.peers import check_names
from tracefuse.measure.timing import UNASKED_S
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.recorded import RecordedCapture
from tracefuse.recording.frames import hide_frames
from tracefuse.step_capture import StepCapture
from tracefuse.text import counted
from tracefuse.widgets.notebook import errors, rich
from tracefuse.widgets.notebook.cell import MAGIC, NAME, WrapCell, mark_cell
from tracefuse.widgets.notebook.notice import Notice
from tracefuse.widgets.view.explorer import Explorer

# --- arguments --------------------------------------------------------------------------------------------------------


def _arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    expression = argument(
        "expression", nargs="*", help="what `%%tracefuse` runs as a line magic; a cell magic runs the cell"
    )
    made = magic_arguments([*MAGIC_OPTIONS, *PASS_OPTIONS])(expression(function))
    # IPython's usage line is reStructuredText for one `%` and the function's own name.
    made.__doc__ = (made.__doc__ or "").replace(f"::\n\n  %{function.__name__} ", f"  {MAGIC} ", 1)
    return made


@_arguments
def _magic(line: str, cell: str | None = None) -> Any:
    """Run the cell once, record every ATen operator of its forward and backward, and show both traces.

    `%%tracefuse` at the top of a cell records the cell; `%tracefuse EXPRESSION` records one expression and returns its
    value. Switch passes on and off in the view; `-o c` keeps the capture: `c.optimize(...)`, `.measure()`, `.export(...)`.
    """
    if cell is None:
        return _run_expression(line)
    # Only reached by run_cell_magic called from code: a cell typed by the user went through the transformers.
    shell = _shell()
    return shell.run_cell(f"{MAGIC} {line}\n{cell}").raise_error()


# `?` and %lsmagic show this name; argparse's usage line takes it from the function too.
_magic.__name__ = "tracefuse"


def parse(line: str) -> tuple[Config, Any]:
    """`(passes, the rest)` of the magic's argument line. Raises `UsageError` for whatever is wrong in it."""
    # posix: IPython's own parse_argstring leaves the quotes in 'h.*.mlp.*'.
    arguments = _magic.parser.parse_args(arg_split(line, posix=True))  # type: ignore[attr-defined]
    name = arguments.output
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"-o {name}: {name!r} is not a variable name; give one, such as -o c")
    if arguments.cuda_graph and not torch.cuda.is_available():
        raise UsageError("--cuda-graph needs a CUDA GPU, and torch sees none on this machine: leave it out")
    if arguments.step is not None and arguments.train_all:
        raise UsageError("--train-all adds up gradients of the whole cell, and --step shows one step: leave out one")
    if arguments.step is not None and arguments.step < 1:
        raise UsageError(f"--step {arguments.step}: steps are counted from 1: give a whole number, such as --step 3")
    try:
        check_names(arguments.peer or ())
        check_folder("html", arguments.html)
        return configuration(arguments), arguments
    except OptionError as error:
        raise UsageError(str(error)) from None


def split_expression(line: str) -> tuple[str, str]:
    """`"--no-cat -o c f(-x)"` as `("--no-cat -o c", "f(-x)")`: argparse would split the expression too."""
    takes_value = {
        flag for option in (*MAGIC_OPTIONS, *PASS_OPTIONS) if option.kind != "switch" for flag in option.flags
    }
    rest = line.lstrip()
    options: list[str] = []
    while rest.startswith("-"):
        word, _, rest = rest.partition(" ")
        rest = rest.lstrip()
        if word == "--":
            break
        options.append(word)
        if word in takes_value:
            value, _, rest = rest.partition(" ")
            options.append(value)
            rest = rest.lstrip()
    return " ".join(options), rest


# --- running ----------------------------------------------------------------------------------------------------------


def _shell() -> InteractiveShell:
    shell = get_ipython()
    if shell is None:
        raise UsageError(f"{MAGIC} needs IPython: in a plain program, use `with tracefuse.capture() as c:`")
    return shell


class TracedCell:
    """The `with` block around a traced cell: records its body, then shows the view.

    Raises `UsageError` if `line`, the magic's arguments, is wrong.
    """

    def __init__(self, line: str) -> None:
        self.shell = _shell()
        self.config, self.arguments = parse(line)
        if self.arguments.expression:
            raise UsageError(f"{MAGIC} takes no expression in its first line: put it into the cell, or use %tracefuse")
        self.value: Any = None
        self.has_value = False
        step, train_all = self.arguments.step, bool(self.arguments.train_all)
        self._capture = StepCapture(step, self._names) if step else RecordedCapture(self._names, train_all)

    def __enter__(self) -> TracedCell:
        self._capture.__enter__()
        return self

    def _names(self) -> dict[str, Any]:
        """Without IPython's own `_`, `__`, `_5`, which are other names for the user's values."""
        return {name: value for name, value in self.shell.user_ns.items() if not name.startswith("_")}

    def keep(self, value: Any) -> None:
        """Hold the value of the cell's last expression, for `take`."""
        self.value, self.has_value = value, True
        self._capture.returned = value

    def take(self) -> Any:
        """The kept value, for IPython to display; the recording's own name is gone from the namespace afterwards."""
        self._leave()
        return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._capture.__exit__(kind, error, tb)
        if error is not None:
            hide_frames(error)
            self._leave()
            if (name := self.arguments.output) in self.shell.user_ns:
                said = f"the cell did not run to its end, and was not captured: {name} is what it was before"
                print(f"tracefuse: {said}", file=sys.stderr)
            return
        # The cell itself has worked: what goes wrong from here on is shown below it and does not stop Run-All.
        try:
            self._show()
        except TracefuseError as problem:
            print(f"tracefuse: {problem}", file=sys.stderr)
        except KeyboardInterrupt as interrupt:
            kept = f"; {name} has the capture, and {name}.explore() shows it" if (name := self.arguments.output) else ""
            print(f"tracefuse: the cell has run, and its view was cancelled{kept}", file=sys.stderr)
            self._leave()
            raise interrupt.with_traceback(None) from None  # our frames would tell nothing
        except Exception:
            self.shell.showtraceback()
        finally:
            if not self.has_value:
                self._leave()

    def _leave(self) -> None:
        self.shell.user_ns.pop(NAME, None)

    def _show(self) -> None:
        name = self.arguments.output
        if name:
            self.shell.user_ns[name] = self._capture
        given = values(self.arguments, MAGIC_OPTIONS)
        target(given["target"])
        is_seen_at_once = getattr(self.shell, "kernel", None) is not None  # in a terminal, text is printed once
        with Notice("assembling the trace") if is_seen_at_once else nullcontext() as notice:
            explorer = self._explorer(name, given, notice)
            variant = explorer.variant
            _replace_views(_cell(self.shell), explorer)
            if notice is not None:
                notice.show(explorer)
        is_asked = variant.runs_triton or self.arguments.budget_s is not None or given["peer"]
        if given["measure"] and not explorer.payload["blocked"]:
            is_on_cpu = variant.program.device.type == "cpu"
            if is_on_cpu and not (is_asked or self.arguments.html) and _is_looked_at(self.shell):
                explorer.measure_behind()
            else:
                explorer.measure(math.inf if is_asked else UNASKED_S)
        if not is_seen_at_once:
            display(explorer)
        if self.arguments.html:
            explorer.save_html(self.arguments.html)

    def _explorer(self, name: str | None, given: dict[str, Any], notice: Notice | None) -> Explorer:
        """The view of what ran; of a large program each of its steps takes seconds."""
        variant = self._capture.variant(self.config)
        if notice is not None:
            notice.next(f"running the passes on {counted(variant.program.whole.op_count, 'op')}")
            _ = variant.whole
            notice.next("working out what the view shows")
        return Explorer(variant, name, given["budget_s"], given["cuda_graph"], given["tune"], given["peer"])


# The views of each cell's last run. ipywidgets keeps every view until it is closed, and a view its capture's tensors: a cell
# that is run again would hold those of every run.
_views: dict[str, tuple[int, list[Explorer]]] = {}


def _cell(shell: InteractiveShell) -> tuple[str, int]:
    """The front end's name of the cell that runs, "" where it gives none, and the number of the run."""
    kernel = getattr(shell, "kernel", None)
    parent = kernel.get_parent("shell") if kernel else {}
    return (parent or {}).get("metadata", {}).get("cellId", ""), shell.execution_count


def _is_looked_at(shell: InteractiveShell) -> bool:
    """Whether the view goes on after its cell: what runs a notebook from its first cell to its last, as nbconvert does, gives
    cells no names, and keeps what they leave."""
    return _cell(shell)[0] != ""


def _replace_views(cell: tuple[str, int], explorer: Explorer) -> None:
    """Close what an earlier run of the cell showed, which its new output has taken the place of."""
    name, run = cell
    before, shown = _views.get(name, (run, []))
    if before != run:
        for old in shown if name else ():
            old.cancel()
            old.close()
        shown = []
    _views[name] = run, [*shown, explorer] if name else []


def _run_expression(line: str) -> Any:
    options, expression = split_expression(line)
    if not expression and {"-h", "--help"} & set(options.split()):
        return print(_magic.__doc__)
    if not expression:
        raise UsageError("%tracefuse needs an expression: %tracefuse f(x), or %%tracefuse at the top of a cell")
    shell = _shell()
    filename = shell.compile.cache(expression, shell.execution_count)
    code = compile(expression, filename, "eval")
    with TracedCell(options) as recording:
        recording.keep(eval(code, shell.user_ns))
        return recording.value


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Install the magic in `shell`; doing so twice is doing so once."""
    unload_ipython_extension(shell)
    # Not part of check_complete: a terminal asks there what it would do with the cell, and decides by the `%%`.
    mark_cell.has_side_effects = True  # type: ignore[attr-defined]
    shell.input_transformers_cleanup.append(mark_cell)
    shell.ast_transformers.append(WrapCell(lambda: shell.ast_node_interactivity))
    shell.register_magic_function(_magic, "line_cell", "tracefuse")
    errors.install(shell)
    rich.install(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove what `load_ipython_extension` installed, an earlier version of this module included."""
    cleanup = shell.input_transformers_cleanup
    cleanup[:] = [t for t in cleanup if getattr(t, "__module__", "") != mark_cell.__module__]
    shell.ast_transformers[:] = [t for t in shell.ast_transformers if type(t).__module__ != WrapCell.__module__]
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("tracefuse", None)
    errors.uninstall(shell)
    rich.uninstall(shell)
