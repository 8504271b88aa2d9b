"""`%%tracefuse` in a real kernel: as if there were no magic, but for the view below the cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch
from forks import run_python
from IPython.core.error import UsageError
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from notebook_kernel import QUICK, SETUP, WIDGET, Kernel

from tracefuse.config.configuration import Config
from tracefuse.widgets.notebook.magic import _run_expression, parse, split_expression

# --- as if there were no magic ----------------------------------------------------------------------------------------


def test_the_cell_runs_once_and_its_last_value_is_displayed(kernel: Kernel) -> None:
    kernel.run("runs = []")
    reply = kernel.run(f"{QUICK}\nruns.append(1)\nloss = x.sin().sum()\nloss.backward()\nprint('hello')\nloss.shape")
    assert (reply.status, reply.value, reply.text) == ("ok", "torch.Size([])", "hello\n")
    assert reply.shows_view
    assert kernel.value("runs, x.grad is not None, Out[max(Out)]") == "([1], True, torch.Size([]))"


def test_a_cell_that_trains_for_several_steps_shows_one_of_them(kernel: Kernel) -> None:
    kernel.run("net = torch.nn.Linear(3, 1)\nsgd = torch.optim.SGD(net.parameters(), lr=0.1)")
    step = "    aim = net(torch.ones(2, 3)).mean()\n    aim.backward()\n    sgd.step()\n    sgd.zero_grad()"
    reply = kernel.run(f"{QUICK} -o many\nfor _i in range(5):\n{step}")
    assert (reply.status, reply.shows_view) == ("ok", True)
    assert kernel.value("many.steps.headline") == "'one step × 5, step 3 shown'"
    assert kernel.value("many.trace.outputs[0].of, sorted(many.optimizers)") == "('aim', ['sgd'])"


def test_the_step_that_a_cell_shows_can_be_chosen(kernel: Kernel) -> None:
    """As `tracefuse train.py --step N` chooses it; the cell itself runs as it is, and its value is displayed."""
    kernel.run("net = torch.nn.Linear(4, 2); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
    loop = "losses = []\nfor _ in range(4):\n    optimizer.zero_grad(); loss = net(x.detach()).sum(); loss.backward()"
    loop += "\n    optimizer.step(); losses.append(loss.item())\nlen(losses)"
    reply = kernel.run(f"{QUICK} --step 2 -o c\n{loop}")
    assert reply.status == "ok", reply.error
    assert kernel.value("c.steps.captured, len(losses)") == "(2, 4)"
    late = kernel.run(f"{QUICK} --step 9 -o late\n{loop}")
    assert late.status == "ok", late.error
    assert "the run ended after" in late.text
    assert kernel.value("len(losses)") == "4"


def test_a_semicolon_suppresses_the_value_but_not_the_view(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK}\nx.cos().sum();")
    assert (reply.value, reply.shows_view) == (None, True)


def test_a_cell_that_ends_with_a_statement_has_no_value(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK}\nfor _i in range(2):\n    z = x.exp()")
    assert (reply.status, reply.value, reply.shows_view) == ("ok", None, True)


def test_an_error_shows_one_clean_frame_at_the_right_line(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK} -o unset\ny = x.sin()\n\nz = y @ torch.randn(7)\nw = 1")
    assert reply.status == "error"
    assert reply.error is not None
    name, shown = reply.error
    assert name == "RuntimeError"
    assert re.findall(r"^-+> +(\d+)", shown, re.MULTILINE) == ["4"]
    assert "size mismatch" in shown
    assert not re.search("/torch/|explorer/|record", shown), shown
    assert not reply.shows_view
    assert kernel.value("'unset' in dir(), 'w' in dir()") == "(False, False)"


def test_a_name_in_use_is_said_to_keep_its_value(kernel: Kernel) -> None:
    assert kernel.run(f"{QUICK} -o held\ny = x.sin()").status == "ok"
    assert kernel.run("first = held").status == "ok"
    reply = kernel.run(f"{QUICK} -o held\ny = x.cos()\n1 / 0")
    assert reply.error is not None
    assert reply.error[0] == "ZeroDivisionError"
    assert "was not captured: held is what it was before" in reply.text
    assert kernel.value("held is first") == "True"


def test_a_frame_of_the_users_own_function_stays(kernel: Kernel) -> None:
    kernel.run("def broken(t):\n    return t.view(3, 7)")
    reply = kernel.run(f"{QUICK}\nout = broken(x)")
    assert reply.error is not None
    assert re.findall(r"^-+> +(\d+)", reply.error[1], re.MULTILINE) == ["2", "2"]
    assert "broken" in reply.error[1]
    assert "/torch/" not in reply.error[1]


def test_an_error_stops_run_all() -> None:
    cells = [SETUP, f"{QUICK}\n1 / 0", "print('must not run')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert notebook.cells[2].execution_count is None


def test_await_at_the_top_level(kernel: Kernel) -> None:
    code = "import asyncio\nawait asyncio.sleep(0)\nasync def late():\n    return x.tan().sum()\nout = await late()\nout.dim()"
    reply = kernel.run(f"{QUICK}\n{code}")
    assert (reply.status, reply.value, reply.shows_view) == ("ok", "0", True)


def test_source_of_what_the_cell_defines(kernel: Kernel) -> None:
    code = "def doubled(t):\n    return 2 * t\n\ny = doubled(x)"
    assert kernel.run(f"{QUICK}\n{code}").status == "ok"
    assert eval(kernel.value("import inspect\ninspect.getsource(doubled)")) == "def doubled(t):\n    return 2 * t\n"


def test_a_triton_kernel_can_be_defined_in_the_cell(kernel: Kernel) -> None:
    code = (
        "import triton, triton.language as tl\n"
        "@triton.jit\ndef copy(a, b, n, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(b + i, tl.load(a + i, i < n), i < n)\n"
        "y = x.sin()\ncopy.src"
    )
    reply = kernel.run(f"{QUICK}\n{code}")
    assert reply.status == "ok", reply.error
    assert reply.value is not None
    assert "def copy" in reply.value


def test_a_syntax_error_then_a_plain_cell(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK}\nx = (1,\nfor")
    assert reply.error is not None
    assert reply.error[0] == "SyntaxError"
    assert "line 3" in reply.error[1] or "line 2" in reply.error[1]
    plain = kernel.run("x.sin().shape")
    assert (plain.value, plain.displayed) == ("torch.Size([4, 4])", [])


def test_future_imports_line_magics_and_multi_line_strings(kernel: Kernel) -> None:
    code = 'def f(a: NotDefined): return a.sum()\n%time y = f(x)\ntext = """one\n%%two\n"""\ntext'
    code = f"from __future__ import annotations\n{code}"
    reply = kernel.run(f"{QUICK}\n{code}")
    assert reply.status == "ok", reply.error
    assert reply.value == repr("one\n%%two\n")
    assert "Wall time" in reply.text


def test_nothing_is_left_in_the_namespace_but_the_output(kernel: Kernel) -> None:
    before = kernel.value("sorted(n for n in globals() if not n.startswith('_'))")
    kernel.run(f"{QUICK} -o captured\nx.sin().sum().backward()\nx.grad.shape")
    after = kernel.value("sorted(n for n in globals() if not n.startswith('_'))")
    assert eval(after) == sorted([*eval(before), "captured"])
    assert (
        kernel.value("[n for n in globals() if 'tracefuse' in n], type(captured).__name__") == "([], 'RecordedCapture')"
    )


def test_an_interrupt_leaves_no_hook_behind(kernel: Kernel) -> None:
    # In slices: Python raises between two calls, and one that starts just then would sleep on.
    waiting = "for _ in range(6000):\n    time.sleep(0.01)"
    request = kernel.send(f"{QUICK} -o halted\nimport time\ny = x.sin()\nprint('started', flush=True)\n{waiting}")
    kernel.wait_for_text(request, "started")
    kernel.manager.interrupt_kernel()
    reply = kernel.collect(request)
    assert reply.error is not None
    assert reply.error[0] == "KeyboardInterrupt"
    assert not reply.shows_view
    state = (
        "from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes\n"
        "from torch.nn.modules import module as m\n"
        "'halted' in dir(), len(modes()), len(m._global_forward_pre_hooks), len(m._global_forward_hooks), "
        "torch.autograd._engine_run_backward.__module__, '__tracefuse_recording__' in globals()"
    )
    assert kernel.value(state) == "(False, 0, 0, 0, 'torch.autograd.graph', False)"


@pytest.fixture
def told_at_once(kernel: Kernel) -> Iterator[None]:
    """What a cell still does is said without a wait, as of a large program."""
    named = "from tracefuse.widgets.notebook import notice; notice.QUIET_S, notice.EVERY_S"
    kernel.run(f"{named} = 0.0, 0.01")
    yield
    kernel.run(f"{named} = 0.5, 1.0")


@pytest.mark.usefixtures("told_at_once")
def test_what_a_cell_still_does_is_said_until_the_view_stands_there(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK}\nprint('the cell')\nx.sin().sum().backward()")
    said, view, still = reply.displayed
    assert re.fullmatch(
        r"tracefuse: assembling the trace … 0 s\. Interrupt the kernel .* to cancel; .*", said["text/plain"]
    )
    assert WIDGET in view
    assert "text/html" in still
    assert reply.text == "the cell\n"


@pytest.mark.usefixtures("told_at_once")
def test_a_view_that_is_cancelled_leaves_the_capture(kernel: Kernel) -> None:
    slow = "import time\nfrom tracefuse.widgets.notebook import magic\nmade = magic.Explorer\n"
    slow += "magic.Explorer = lambda *given: [time.sleep(0.01) for _ in range(6000)]"
    assert kernel.run(slow).status == "ok"
    request = kernel.send(f"{QUICK} -o kept\nx.sin().sum().backward()")
    while kernel.client.get_iopub_msg(timeout=60)["msg_type"] != "update_display_data":
        pass
    kernel.manager.interrupt_kernel()
    reply = kernel.collect(request)
    kernel.run("magic.Explorer = made")
    assert reply.error is not None
    assert reply.error[0] == "KeyboardInterrupt"
    assert (
        "the cell has run, and its view was cancelled; kept has the capture, and kept.explore() shows it" in reply.text
    )
    assert kernel.value("len(kept.trace.ops) > 0") == "True"


def test_inside_another_cell_magic(kernel: Kernel) -> None:
    reply = kernel.run(f"%%time\n{QUICK}\nx.sin()[0, 0] > 9")
    assert reply.status == "ok", reply.error
    assert reply.shows_view
    assert "Wall time" in reply.text
    assert reply.value == "tensor(False)"


# --- its own business -------------------------------------------------------------------------------------------------


def test_the_view_has_a_plain_text_form(kernel: Kernel) -> None:
    reply = kernel.run("%%tracefuse\nx.sin().sum().backward()")
    (bundle,) = (b for b in reply.displayed if "text/html" in b)
    assert re.search(r"\d+ -> \d+ ops", bundle["text/plain"])
    assert "measured on" in bundle["text/plain"] or "not measured" in bundle["text/plain"]
    assert "</table>" in bundle["text/html"]
    assert "Run the cell again" in bundle["text/html"]


def test_results_and_inputs_have_the_users_names(kernel: Kernel) -> None:
    kernel.run(f"{QUICK} -o c\nloss = (x * 3).sum()\nloss.backward()")
    assert (
        kernel.value("[i.source for i in c.trace.inputs][:1], [o.of for o in c.trace.outputs]")
        == "(['x'], ['loss', 'x'])"
    )


def test_a_line_traces_one_expression_and_returns_it(kernel: Kernel) -> None:
    reply = kernel.run("out = %tracefuse --no-measure --no-cat -o c (-x).sin()\nout.shape")
    assert (reply.value, reply.shows_view) == ("torch.Size([4, 4])", True)
    assert kernel.value("[str(n.target) for n in c.trace.ops]") == "['aten.neg.default', 'aten.sin.default']"


def test_the_page_is_written(kernel: Kernel, tmp_path: Path) -> None:
    target = tmp_path / "view.html"
    reply = kernel.run(f"{QUICK} --html {target}\nx.sin().sum().backward()")
    assert reply.status == "ok", reply.error
    assert target.read_text().startswith("<!doctype html>")


def test_help_and_lsmagic(kernel: Kernel) -> None:
    reply = kernel.run("%%tracefuse?")
    assert (reply.status, reply.displayed) == ("ok", [])
    usage = kernel.value("get_ipython().find_cell_magic('tracefuse').__doc__")
    assert "%%tracefuse [-o NAME]" in usage
    assert "_magic" not in usage
    assert "::" not in usage
    listed = (
        "magics = get_ipython().magics_manager.lsmagic()\n['tracefuse' in magics[kind] for kind in ('line', 'cell')]"
    )
    assert kernel.value(listed) == "[True, True]"
    assert "--remat" in kernel.value("get_ipython().find_cell_magic('tracefuse').__doc__")


@pytest.mark.parametrize(
    "line",
    [
        "--remat heavy",
        "--no-such-flag",
        "-o 2x",
        "-o class",
        "--remat 2",
        "-o a stray",
        "--step 0",
        "--step 2 --train-all",
    ],
)
def test_bad_arguments_are_usage_errors_and_run_nothing(kernel: Kernel, line: str) -> None:
    kernel.run("ran = False")
    reply = kernel.run(f"%%tracefuse {line}\nran = True")
    assert reply.status == "error"
    assert "UsageError" in reply.text
    assert "Traceback" not in reply.text
    assert kernel.value("ran") == "False"


def test_a_cell_without_operators_says_so(kernel: Kernel) -> None:
    reply = kernel.run(f"{QUICK}\n1 + 1")
    assert reply.status == "ok"
    assert "tracefuse: nothing was captured" in reply.text
    assert "Traceback" not in reply.text
    assert kernel.value("'__tracefuse_recording__' in globals()") == "False"


def test_a_bad_glob_is_said_in_the_view_and_nothing_is_measured(kernel: Kernel) -> None:
    reply = kernel.run("%%tracefuse --freeze nope\nx.sin().sum().backward()")
    (bundle,) = (b for b in reply.displayed if "text/html" in b)
    assert "freeze: " in bundle["text/plain"]
    assert "times: not measured" in bundle["text/plain"]


def test_a_page_that_cannot_be_written_is_refused_before_the_cell_runs(kernel: Kernel) -> None:
    reply = kernel.run("%%tracefuse --html gone/a.html\nhas_run = True\nx.sin().sum().backward()")
    assert reply.status == "error"
    assert "--html gone/a.html: there is no such directory: create it" in reply.text
    assert kernel.value("'has_run' in globals()") == "False"


def test_the_budget_is_that_of_the_first_line(kernel: Kernel) -> None:
    reply = kernel.run("%%tracefuse -o timed --budget-s 0.01\nx.sin().sum().backward()")
    assert reply.status == "ok", reply.error
    rounds = "[v.timing.stopped for v in timed._variants.values() if v.timing]"
    assert kernel.value(rounds) == "['budget of 0.01 s']"


def test_on_a_cpu_a_cell_waits_so_long_for_times_that_nobody_asked_for(kernel: Kernel) -> None:
    kernel.run("from tracefuse.widgets.notebook import magic\nmagic.UNASKED_S = 0.0")
    kernel.run("%%tracefuse -o c\ny = x.sin().sum()\ny.backward()")
    assert kernel.run("print(c.measurements.timings)").text.strip() == "{}"
    kernel.run("%%tracefuse --budget-s 0.1 -o c\ny = x.sin().sum()\ny.backward()")
    assert kernel.run("print(len(c.measurements.timings))").text.strip() == "1"


def test_a_cell_that_goes_on_after_its_step_is_not_measured_and_says_why(kernel: Kernel) -> None:
    kernel.run("layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)\nopt = torch.optim.SGD(layer.parameters(), lr=0.1)")
    reply = kernel.run("%%tracefuse\nlayer(x).sum().backward()\nopt.step()\nafter = layer(x)")
    (bundle,) = (b for b in reply.displayed if "text/html" in b)
    assert (
        "after = layer(x)) with what the optimizer changed. Capture one forward, its backward and its update "
        "by themselves (`with tracefuse.capture():`)." in bundle["text/plain"]
    )
    assert reply.text == ""


def test_a_wrong_option_in_python_shows_the_users_frames_only(kernel: Kernel) -> None:
    kernel.run(f"{QUICK} -o c\nx.sin().sum().backward()")
    kernel.run("def choose():\n    return c.optimize(remat='heavy')")
    reply = kernel.run("choose()")
    assert reply.status == "error"
    assert reply.error is not None
    name, shown = reply.error
    assert name == "OptionError"
    assert "is no weight" in shown
    assert re.findall(r"^-+> +(\d+)", shown, re.MULTILINE) == ["1", "2"]
    assert not re.search("explorer/|options.py", shown), shown
    reply = kernel.run("c.optimize(freeze='nope')")
    assert reply.error is not None
    assert reply.error[0] == "PassError"
    assert reply.error[1].count("nope") == 2  # the user's line and the message
    assert "direct cause" not in reply.error[1]


def test_captures_and_variants_are_shown_as_views_with_their_plain_form(kernel: Kernel) -> None:
    kernel.run(f"{QUICK} -o c\nx.sin().sum().backward()")
    views = "len(__import__('ipywidgets').widgets.widget._instances)"
    for expression, shown in (("c", "<tracefuse.Capture"), ("c.optimize(cat=False)", "<tracefuse.Variant")):
        before = int(kernel.value(views))
        assert kernel.value(expression).startswith(shown)
        assert int(kernel.value(views)) > before
    assert "[<tracefuse.Capture" in kernel.value("[c]")


def test_unloading_removes_the_handler_of_our_errors(kernel: Kernel) -> None:
    state = "[e.__name__ for e in get_ipython().custom_exceptions]"
    assert kernel.value(state) == "['TracefuseError']"
    kernel.run("%unload_ext tracefuse")
    assert kernel.value(state) == "[]"
    kernel.run("%load_ext tracefuse")
    assert kernel.value(state) == "['TracefuseError']"


def test_reloading_and_unloading(kernel: Kernel) -> None:
    kernel.run("%reload_ext tracefuse")
    assert kernel.run(f"{QUICK}\nx.sin();").shows_view
    counts = "len([t for t in get_ipython().ast_transformers if 'tracefuse' in type(t).__module__])"
    assert kernel.value(counts) == "1"


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_become_a_configuration() -> None:
    config, rest = parse("-o c --no-cat --freeze 'h.*.mlp.*' --freeze head --remat off --no-measure")
    assert config == Config(cat=False, freeze=("h.*.mlp.*", "head"), remat=None)
    assert (rest.output, rest.no_measure, rest.html) == ("c", True, None)


def test_contradicting_arguments_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="contradict"):
        parse("--freeze a --no-freeze")


@pytest.mark.parametrize(
    ("line", "options", "expression"),
    [
        ("f(x)", "", "f(x)"),
        ("--no-cat -o c f('a b', -x)", "--no-cat -o c", "f('a b', -x)"),
        ("-o c -- -x", "-o c", "-x"),
        ("--freeze h.* --no-measure model(x)", "--freeze h.* --no-measure", "model(x)"),
    ],
)
def test_an_expression_is_left_as_it_is(line: str, options: str, expression: str) -> None:
    assert split_expression(line) == (options, expression)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_a_cuda_graph_without_a_gpu_is_refused_before_the_cell_runs() -> None:
    with pytest.raises(UsageError, match=r"--cuda-graph needs a CUDA GPU.*leave it out"):
        parse("--cuda-graph")


def test_in_a_terminal_the_text_has_what_was_measured(tmp_path: Path) -> None:
    cell = f"{SETUP}\nget_ipython().run_cell('%%tracefuse --budget-s 0.05\\nx.sin().sum().backward()')"
    (tmp_path / "session.ipy").write_text(cell)
    done = run_python(["-m", "IPython", "--no-banner", "--colors=NoColor", "session.ipy"], cwd=tmp_path)
    assert "measured on CPU" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("line", ["--help", "-h", "--no-cat --help"])
def test_help_as_a_line_is_the_text_of_the_magic(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run_expression(line)
    said = capsys.readouterr().out
    assert "%%tracefuse [-o NAME]" in said
    assert "--no-cat" in said
