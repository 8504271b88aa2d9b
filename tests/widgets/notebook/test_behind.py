"""On a CPU a cell ends with its view, which is timed behind it, in a real kernel; whoever runs a notebook without looking at
it gets the times with the cell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from notebook_kernel import SETUP, WIDGET, Kernel

PATIENCE_S = 120
SLOW = """
from tracefuse.measure import rounds
rounds.TIGHT, rounds.MAX_ROUNDS, rounds.MIN_ROUNDS = 0.0, 10**9, 10**9  # until its budget is spent: nothing before is enough
from tracefuse.widgets.view.tasks import is_unasked_timed
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
from tracefuse.widgets.notebook import magic
def view():
    return magic._views["a"][1][-1]
def threads():
    import threading
    return [one.name for one in threading.enumerate()].count("tracefuse unasked")
"""
TRACED = "%%tracefuse -o c\nmodel(torch.ones(8, 64)).sum().backward()"


@pytest.fixture(scope="module", autouse=True)
def slow(kernel: Kernel) -> None:
    assert kernel.run(SLOW).error is None


@pytest.fixture
def behind(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel that measures behind a cell, in rounds."""
    reply = kernel.run(TRACED, cell="a")
    assert (reply.error, reply.shows_view) == (None, True)
    assert kernel.value("len(c.measurements.timings), view().status['busy']") == "(0, '')"
    yield kernel
    kernel.run("view().close()")


def said(kernel: Kernel, word: str) -> None:
    """Until the view's status has said it, without a cell: one would end what is measured."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=PATIENCE_S)
        data = message["content"].get("data", {}) if message["msg_type"] == "comm_msg" else {}
        if word in str(data.get("state", {}).get("status", {}).get("text")):
            return
    raise AssertionError(word)


def until(kernel: Kernel, expression: str) -> None:
    """Until it is true, asked so seldom that what is measured may end."""
    deadline = time.monotonic() + PATIENCE_S
    pause_s = 0.5
    while kernel.value(f"bool({expression})") != "True":
        assert time.monotonic() < deadline
        time.sleep(pause_s)
        pause_s *= 2


def test_the_cell_ends_before_it_is_measured_and_the_times_come_behind_it(behind: Kernel) -> None:
    assert behind.value("view()._unasked.is_on") == "True"
    until(behind, "c.measurements.timelines")
    assert behind.value("view().status") == "{'busy': '', 'progress': None, 'text': '', 'error': None}"
    assert behind.value("view().payload['timing']['stale'], threads()") == "(False, 0)"


def test_a_cell_that_runs_meanwhile_is_alone_and_finds_everything_as_it_left_it(behind: Kernel) -> None:
    behind.run("torch.manual_seed(5); twin = torch.Generator().manual_seed(5)")
    state = (
        "torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled('cpu'), torch.get_num_threads(), "
        "torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled"
    )
    before = behind.value(state)
    for _ in range(3):
        said(behind, "round")
        assert behind.value("torch.equal(torch.rand(5), torch.rand(5, generator=twin))") == "True"
        assert behind.value(state) == before
        assert behind.value("is_unasked_timed()") == "False"
        behind.run("optimizer.step()")


def test_parameters_that_the_next_cell_changes_change_no_verdict(behind: Kernel) -> None:
    said(behind, "first run")
    behind.run("for parameter in model.parameters():\n    parameter.data.mul_(3.0)\noptimizer.step()")
    until(behind, "c.measurements.timings")
    said_of = "next(iter(c.measurements.timings.values())).programs[1].difference.said"
    assert behind.value(f"{said_of}.startswith('the same')") == "True"


def test_the_cell_that_is_run_again_ends_the_measuring_of_its_last_view(behind: Kernel) -> None:
    said(behind, "round")
    behind.run("old = view()")
    behind.run(TRACED, cell="a")
    assert (
        behind.value("old._unasked.is_on, view() is old, view()._unasked.is_on, threads()") == "(False, False, True, 1)"
    )


def test_the_stop_button_ends_no_more_than_what_the_kernel_runs(behind: Kernel) -> None:
    said(behind, "round")
    behind.manager.interrupt_kernel()
    until(behind, "c.measurements.timelines")
    said_of = behind.send("import time\ntime.sleep(60)")
    time.sleep(1)
    behind.manager.interrupt_kernel()
    reply = behind.collect(said_of)
    assert reply.error is not None
    assert reply.error[0] == "KeyboardInterrupt"


def test_times_that_python_asks_for_come_with_its_cell(behind: Kernel) -> None:
    said(behind, "round")
    behind.run("view().budget_s = 0.2; view().measure(); found = len(c.measurements.timings)")
    assert behind.value("found, view().status['error'], view()._unasked.is_on") == "(1, None, False)"


@pytest.mark.parametrize("options", ["--budget-s 0.2", "--html page.html", "--peer eager --budget-s 0.2"])
def test_what_is_asked_for_is_measured_within_the_cell(kernel: Kernel, tmp_path: Path, options: str) -> None:
    kernel.run(f"%cd {tmp_path}")
    reply = kernel.run(TRACED.replace("-o c", f"-o c {options}"), cell="b")
    assert (reply.error, reply.shows_view) == (None, True)
    assert kernel.value("len(c.measurements.timings)") == "1"
    assert (tmp_path / "page.html").exists() == ("html" in options)


def test_a_notebook_that_nobody_looks_at_is_saved_with_its_times() -> None:
    """As by `jupyter nbconvert --execute`."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (
        SETUP, "%%tracefuse --no-cat\nx.sin().sum().backward()",
    )])  # fmt: skip
    NotebookClient(notebook, kernel_name="python3").execute()
    shown = [output["data"] for output in notebook.cells[1].outputs if "data" in output]
    assert any(WIDGET in data for data in shown)
    assert any("measured on CPU" in data["text/plain"] for data in shown)


def test_what_is_saved_before_it_is_measured_says_so(kernel: Kernel) -> None:
    reply = kernel.run(TRACED, cell="a")
    (still,) = (data for data in reply.displayed if "text/html" in data)
    assert "times: not measured" in still["text/plain"]
    assert "times: not measured" in kernel.value("print(view())\nstr(view())")
    kernel.run("view().close()")


def test_a_kernel_that_is_shut_down_meanwhile_ends_at_once_and_clean() -> None:
    own = Kernel()
    assert own.run(SETUP).error is None
    assert own.run(SLOW).error is None
    own.run(TRACED, cell="a")
    said(own, "round")
    process = own.manager.provisioner.process
    own.client.shutdown()
    own.client.stop_channels()
    assert process.wait(10) == 0
    own.manager.shutdown_kernel(now=True)
