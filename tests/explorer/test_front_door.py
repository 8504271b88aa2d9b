"""The front door: what is public, what importing it imports, and what is told before torch is there. Counted, not timed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import tracefuse

PUBLIC = [
    "Capture", "CompiledGraph", "Config", "SyncError", "TracefuseError", "Variant", "__version__", "assert_no_sync", "board",
    "capture", "capture_step", "compare_timelines", "compiled", "explore", "gather_ahead", "load", "load_ranks",
    "load_timeline", "machine", "profile_run", "register", "replay", "target", "unregister",
]  # fmt: skip
HEAVY = (
    "scipy",
    "transformers",
    "IPython",
    "anywidget",
    "ipywidgets",
    "plotly",
    "matplotlib",
    "pandas",
    "jupyter_client",
)


def imported_by(statement: str, *before: str) -> set[str]:
    """The modules that `statement` imports in a fresh interpreter that has imported those of `before`."""
    program = f"import sys{''.join(f', {name}' for name in before)}\nknown = set(sys.modules)\n{statement}\n"
    told = "print('\\n'.join(sorted(set(sys.modules) - known)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program + told], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_what_is_public_is_listed_and_nothing_else() -> None:
    assert sorted(dir(tracefuse)) == PUBLIC
    assert sorted([*tracefuse.__all__, "__version__"]) == PUBLIC
    _ = tracefuse.config  # a module that was imported is not listed either
    assert sorted(dir(tracefuse)) == PUBLIC
    assert all(getattr(tracefuse, name) is not None for name in PUBLIC)
    assert tracefuse.__version__ == version("tracefuse")


def test_where_ipython_runs_importing_it_is_enough_for_its_magic() -> None:
    """And imports no torch until a cell begins with it; `load_ext` and `unload_ext` still do what they say."""
    program = r"""
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
run = lambda cell: shell.run_cell(cell).raise_error()
run("import tracefuse")
assert "torch" not in sys.modules
run("%%tracefuse -o c\nimport torch\ntorch.ones(2).exp().sum()")
assert "exp" in str(shell.user_ns["c"].trace.code)
run("%load_ext tracefuse")
run("%reload_ext tracefuse")
assert sum(type(one).__name__ == "WrapCell" for one in shell.ast_transformers) == 1
run("%unload_ext tracefuse")
assert shell.find_cell_magic("tracefuse") is None and "tracefuse" not in shell.magics_manager.lazy_magics
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("use_jedi", [True, False])
def test_completion_lists_no_modules(use_jedi: bool) -> None:
    from IPython.core.completer import IPCompleter, provisionalcompleter

    completer = IPCompleter(namespace={"tracefuse": tracefuse}, use_jedi=use_jedi)
    with provisionalcompleter():
        listed = {one.text.removeprefix(".") for one in completer.completions("tracefuse.", len("tracefuse."))}
    assert listed == set(tracefuse.__all__)


def test_a_module_is_an_attribute_without_being_imported_first() -> None:
    program = "import tracefuse; print(tracefuse.config.Config, tracefuse.optimizers.trace.Trace)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Config" in done.stdout
    for name in ("nothing", "_nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'tracefuse' has no attribute '{name}'"):
            getattr(tracefuse, name)


def test_type_checkers_read_the_homes_that_python_imports_from(root: Path) -> None:
    tree = ast.parse((root / "explorer" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert told == {name: f"tracefuse.{home}" for name, home in tracefuse._HOME_OF.items()}
    assert set(told) == set(tracefuse.__all__)


def public_functions() -> list[tuple[str, Any]]:
    found = [(name, getattr(tracefuse, name)) for name in tracefuse.__all__]
    return [(name, one) for name, one in found if inspect.isfunction(one)]


@pytest.mark.parametrize(("name", "function"), public_functions(), ids=[name for name, _ in public_functions()])
def test_a_public_function_says_what_it_returns(name: str, function: Any) -> None:
    for one in typing.get_overloads(function) or [function]:
        assert inspect.signature(one).return_annotation not in ("Any", Any, inspect.Signature.empty)


# --- what is imported -------------------------------------------------------------------------------------------------


def test_importing_tracefuse_imports_nothing_but_itself() -> None:
    found = imported_by("import tracefuse")
    assert {name for name in found if name.startswith("tracefuse")} == {"tracefuse"}
    assert tops(found) - {"tracefuse"} <= sys.stdlib_module_names


def test_the_first_name_imports_no_room_above_and_no_compiler() -> None:
    found = imported_by("import tracefuse; tracefuse.capture, tracefuse.load, tracefuse.Config()", "torch")
    assert tops(found).isdisjoint(HEAVY)
    assert not {name for name in found if name.startswith(("triton.", "torch._inductor", "tracefuse.widgets"))}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["demo", "--help"],
        ["cache", "--help"],
        ["--bogus"],
        ["nowhere.py"],
        ["demo", "--budget-s", "0"],
    ],
    ids=" ".join,
)
def test_usage_is_told_without_torch(words: list[str]) -> None:
    run = f"from tracefuse.cli import main\ntry:\n    main({words})\nexcept SystemExit as end:\n    print(end.code)"
    program = f"import sys\n{run}\nprint([name for name in sys.modules if name in ('torch', 'numpy', 'triton')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    status, heavy = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    assert re.fullmatch("0|2", status)
