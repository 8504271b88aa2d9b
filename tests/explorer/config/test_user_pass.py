"""A pass of the user's own: registered, it is a toggle on every surface; what it does wrong is said in its row."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from own_passes import capture, halved, made, nothing
from traces import captured, demanded, ops

import tracefuse
from tracefuse.config import registry
from tracefuse.config.configuration import Config
from tracefuse.config.names import OFF_BY_DEFAULT
from tracefuse.errors import OptionError, RegistrationError
from tracefuse.optimizers.ops import op_name
from tracefuse.tables.summary import passes_table
from tracefuse.widgets.html import to_html
from tracefuse.widgets.notebook.magic import parse
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.text import to_text
from tracefuse.widgets.view.explorer import Explorer


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


# --- the example ------------------------------------------------------------------------------------------------------


def example() -> str:
    lines = inspect.getdoc(tracefuse.register).split("\n\n")
    return textwrap.dedent("\n\n".join(part for part in lines if part.startswith("    ")))


def run(code: str) -> None:
    exec(compile(code, "<example>", "exec", dont_inherit=True), {"__name__": "__main__"})


def test_the_documented_example_is_a_toggle() -> None:
    assert example().partition("class ")[2].count("\n") <= 10
    run(example())
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    c = captured(lambda: (x**2).sum().backward())
    on, off = c.optimize(simplify=False, fuse=False), c.optimize(simplify=False, fuse=False, square_by_product=False)
    assert ops(on.forward) == ["mul", "sum"]
    assert ops(off.forward) == ["pow", "sum"]
    step = next(s for s in on.passes if s.name == "square_by_product")
    squared = next(n.name for n in off.forward.ops if op_name(n).startswith("aten.pow"))
    assert [str(d) for d in step.decisions] == [f"replace {squared}: a product is the same"]
    found = demanded(on.trace, tracefuse.replay(on.trace, c.example_inputs, c.rng_states))
    torch.testing.assert_close(found["gradient", "x"], 2 * x.detach(), rtol=1e-12, atol=0)


def test_the_readme_has_an_example_that_runs(root: Any) -> None:
    section = (root / "README.md").read_text().split("A pass of your own")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    run(code)
    assert [one.name for one in registry.registered()] == ["square_by_product"]
    variant = captured(lambda: (torch.ones(3, requires_grad=True) ** 2).sum().backward()).optimize()
    assert "square_by_product" in [s.name for s in variant.passes]


# --- surfaces ---------------------------------------------------------------------------------------------------------


def test_it_is_on_from_the_start_and_can_be_switched_off() -> None:
    tracefuse.register(made(halved))
    c = capture()
    assert [p.name for p in Config().passes()].index("mine") == Config().names.index("remat") - 1
    assert "mine" in [s.name for s in c.optimize().passes]
    assert "mine" not in [s.name for s in c.optimize(mine=False).passes]
    assert "mine" not in [p.name for p in Config.off().passes()]
    assert Config.of(mine=False).as_code() == "c.optimize(mine=False)"
    assert Config().as_code() == "c.optimize()"


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [({"before": "simplify"}, None, "simplify"), ({"before": "fuse"}, "optimizer_step", "fuse"),
     ({"after": "cat"}, "cat", "linear_cross_entropy"),
     ({"after": "fuse"}, "fuse", "overlap"), ({"after": "overlap"}, "overlap", None), ({}, "pad", "remat")],
)  # fmt: skip
def test_it_runs_where_it_was_put(place: dict[str, str], before: str | None, after: str | None) -> None:
    tracefuse.register(**place)(made(halved))
    names = [None, *Config().names, None]
    at = names.index("mine")
    assert (names[at - 1], names[at + 1]) == (before, after)
    steps = [s.name for s in capture().optimize().passes]
    assert (
        steps == [p.name for p in Config().passes()] == [name for name in names if name and name not in OFF_BY_DEFAULT]
    )


def test_its_fields_are_options_everywhere() -> None:
    mine = tracefuse.register(made(halved, most=2, exact=True))
    expected = Config.of(mine={"most": 1})
    assert expected == Config.of(mine=mine(most=1)) == parse("--pass mine:most=1")[0]
    assert [p.inner for p in expected.passes() if p.name == "mine"] == [mine(most=1)]
    assert expected.as_code() == "c.optimize(mine={'most': 1})"
    assert eval(expected.as_code(), {"c": type("c", (), {"optimize": staticmethod(Config.of)})}) == expected
    assert Config.of(mine={"most": 2}) == Config.of(mine=True) == Config()
    c = capture()
    counts = [
        ops(c.optimize(mine=one, fuse=False, remat=False).trace).count("add") for one in (True, {"most": 1}, False)
    ]
    assert counts == [2, 1, 0]


def test_flags_switch_it() -> None:
    tracefuse.register(made(halved))
    assert parse("--no-pass mine")[0] == Config.of(mine=False) == parse("--no-pass mine --pass cat")[0]
    assert parse("--pass mine")[0] == Config() == parse("")[0]
    for line, message in {
        "--no-pass mien": "did you mean mine", "--pass mine --no-pass mine": "contradict",
        "--pass mine:most=1": "leave it out", "--pass mine:most": "write NAME=VALUE",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=message):
            parse(line)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"level": 1}, "did you mean"), ({"levels": "many"}, "is no whole number"), (3, "is no mapping"),
        ({"rate": float("nan")}, "is no number"),
    ],
)  # fmt: skip
def test_bad_options_of_it_name_the_remedy(value: Any, message: str) -> None:
    tracefuse.register(made(halved, levels=1, rate=0.5))
    with pytest.raises(OptionError, match=message):
        Config.of(mine=value)


def test_what_it_refuses_itself_is_an_option_error() -> None:
    def checked(self: Any) -> None:
        if self.most < 0:
            raise ValueError("most=-1 is too few: pass 0 or more")

    tracefuse.register(dataclass(frozen=True)(type("Mine", (made(halved, most=1),), {"__post_init__": checked})))
    with pytest.raises(OptionError, match="mine: most=-1 is too few"):
        Config.of(mine={"most": -1})


def test_the_view_has_its_row_with_decisions_and_options() -> None:
    tracefuse.register(made(halved, most=2))
    explorer = Explorer(capture().variant(Config.of(mine={"most": 1})))
    row = next(p for p in explorer.payload["passes"] if p["name"] == "mine")
    assert (row["enabled"], row["state"], row["error"]) == (True, "on", None)
    assert explorer.payload["decisions"]["mine"][0]["reason"] == "a sum"
    assert row["options"] == [{"name": "most", "kind": "number", "value": "1", "default": "2", "help": ""}]
    assert explorer.payload["config"]["mine"] == {"most": "1"}
    assert [p["name"] for p in explorer.payload["passes"]] == Config().names
    assert "\nmine " in to_text(explorer.payload)
    assert "+ mine" in passes_table(explorer.variant)
    for given in ({"most": "2"}, False, True):
        explorer._on_message(explorer, {"type": "configure", "changes": {"mine": given}}, [])
        assert explorer.variant.config == Config.of(mine=given)
    explorer._on_message(explorer, {"type": "configure", "changes": {"mine": {"most": "x"}}}, [])
    assert explorer.status["error"]["at"] == "mine"


def test_the_saved_page_holds_it_off_too() -> None:
    tracefuse.register(made(halved))
    (held,) = re.findall(
        r'<script id="held" type="text/plain">(.*?)</script>', to_html(capture().optimize()), re.DOTALL
    )
    assert {p["config"]["mine"] for p in decode(held)["payloads"]} == {True, False}


def test_it_is_measured_and_exported_like_any_other(tmp_path: Any) -> None:
    tracefuse.register(made(halved))
    c = capture()
    variant = c.optimize(fuse=False)
    text = variant.export(tmp_path / "step.py").read_text()
    assert "= torch.add(sin, sin)" in text, "the pass writes 2 * x as x + x"
    assert "c.optimize(fuse=False)" in text
    assert "optimised" in str(variant.measure(budget_s=0.05))
    found = demanded(variant.trace, tracefuse.replay(variant.trace, c.example_inputs, c.rng_states))
    x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64)
    torch.testing.assert_close(found["gradient", "x"], 4 * x.cos() * (2 * x.sin()).exp(), rtol=1e-12, atol=0)


# --- running the cell again -------------------------------------------------------------------------------------------


def test_registering_a_name_again_replaces_the_pass_and_what_it_computed() -> None:
    tracefuse.register(made(halved))
    c = capture()
    old, old_config = c.optimize(fuse=False), Config()
    tracefuse.register(made(nothing))
    new = c.optimize(fuse=False)
    assert "add" in ops(old.trace)
    assert "add" not in ops(new.trace)
    assert new is not old
    assert Config() != old_config
    assert "add" not in ops(old.with_config(cat=False).trace), "a toggle in an old view runs the new code"


def test_the_same_cell_run_again_is_computed_anew() -> None:
    tracefuse.register(made(halved))
    before = Config()
    tracefuse.register(made(halved))
    assert Config() != before, "helpers that it calls may have changed"


def test_options_outlive_a_replaced_class_as_far_as_it_has_them() -> None:
    tracefuse.register(made(halved, most=2, other=1))
    config = Config.of(mine={"most": 1, "other": 5})
    tracefuse.register(made(halved, most=2))
    assert config.changed(cat=False) == Config.of(cat=False, mine={"most": 1})
    tracefuse.register(made(halved, most=(1,)))
    assert config.changed(cat=False) == Config.of(cat=False)
    with pytest.raises(OptionError, match="of another class than the one registered now"):
        Config.of(mine=next(one.chosen for one in config.own))


def test_a_view_from_before_gets_its_row_switched_off() -> None:
    explorer = Explorer(capture().variant(Config()), name="c")
    tracefuse.register(made(halved))
    explorer.configure({"cat": False})
    row = next(p for p in explorer.payload["passes"] if p["name"] == "mine")
    assert (row["state"], explorer.payload["call"]) == ("off", "c.optimize(cat=False, mine=False)")
    explorer.configure({"mine": True})
    assert explorer.variant.config == Config.of(cat=False)


def test_what_is_unregistered_is_gone() -> None:
    tracefuse.register(made(halved))
    config = Config()
    tracefuse.unregister("mine")
    assert "mine" not in Config().names
    assert "mine" not in config.changed(cat=False).names
    with pytest.raises(RegistrationError, match="no pass 'mine' is registered"):
        tracefuse.unregister("mine")
    with pytest.raises(OptionError, match="there is no option 'mine'"):
        Config.of(mine=True)
