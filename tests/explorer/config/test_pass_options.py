"""Every field of a pass is an option: by name, with a default and a sentence, alike in Python, in flags and in the view."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import pytest

from tracefuse.cli.choices import configuration
from tracefuse.cli.command import main
from tracefuse.cli.flags import PASS_OPTIONS, add_arguments
from tracefuse.config.configuration import REMAT_OPTIONS, Config
from tracefuse.config.names import OPTION_OF, PASS_OF, PASSES
from tracefuse.config.pass_options import PassOption, options_of, read, read_all, written
from tracefuse.errors import OptionError
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.remat import Remat
from tracefuse.widgets.notebook.magic import parse
from tracefuse.widgets.payload.program import config_record

GIB = 1 << 30
OTHER_PEAKS = Peaks(1e12, 1e14, "another GPU")


def of_flags(*flags: str) -> Config:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, PASS_OPTIONS)
    return configuration(parser.parse_args(flags))


def remat(config: Config) -> Remat:
    return next(p for p in config.passes() if p.name == "remat")  # type: ignore[return-value]


# --- the budget -------------------------------------------------------------------------------------------------------

BUDGETS = [
    (None, None), (False, None), ("off", None), (0, 0.0), (0.4, 0.4), ("0.4", 0.4), ("40 %", 0.4), ("40%", 0.4), (1, 1.0),
    ("1", 1.0), (1.0, 1.0), (2 * GIB, 2 * GIB), (2.5e9, 2_500_000_000), ("2GiB", 2 * GIB), ("2 gib", 2 * GIB), ("2G", 2 * GIB),
    ("2 GB", 2 * 10**9), ("2gb", 2 * 10**9), ("1.5 MB", 1_500_000), ("3 kB", 3000), ("1TB", 10**12),
    ("2k", 2048), ("1.5MiB", 3 << 19), ("512 B", 512), ("3e9", None), ("4096", 4096),
]  # fmt: skip


@pytest.mark.parametrize(("given", "budget"), [pair for pair in BUDGETS if pair[0] != "3e9"])
def test_a_budget_is_a_fraction_or_bytes(given: Any, budget: float | None) -> None:
    config = Config.of(memory_budget=given)
    assert (config.memory_budget, type(config.memory_budget)) == (budget, type(budget))
    assert remat(config).memory_budget == budget
    assert config == Config(memory_budget=budget)
    assert (config == Config()) == (budget is None)


@pytest.mark.parametrize(
    "given", ["3e9", "much", -1, "-1", math.nan, math.inf, True, "140 %", "2 furlongs", "2 GB %", [1]]
)
def test_what_is_no_budget_names_the_remedy(given: Any) -> None:
    with pytest.raises(OptionError, match=r"is no budget: pass a fraction such as 0.4, or bytes such as '2GiB'"):
        Config.of(memory_budget=given)


@pytest.mark.parametrize(("given", "named"), [(1.5, "1.5"), (2.5, "2.5"), (40, "40"), ("40", "40")])
def test_a_number_that_lost_its_unit_is_not_taken_for_bytes(given: Any, named: str) -> None:
    with pytest.raises(
        OptionError, match=rf"would be {named} bytes: write '{named}%', a fraction up to 1, or bytes as"
    ):
        Config.of(memory_budget=given)


# --- the rest of remat ------------------------------------------------------------------------------------------------


def test_every_field_of_remat_is_an_option_with_a_sentence() -> None:
    assert set(OPTION_OF["remat"].values()) <= {option.name for option in PASS_OPTIONS}
    assert {f.name for f in dataclasses.fields(Remat)} == {*OPTION_OF["remat"], *REMAT_OPTIONS}
    for option in options_of(Remat).values():
        assert option.help, f"{option.name} needs metadata={{'help': ...}}"
        assert option.default == getattr(Remat(), option.name)


@pytest.mark.parametrize("name", [o.name for o in REMAT_OPTIONS.values() if o.is_text])
def test_the_default_of_every_option_can_be_written_and_changes_nothing(name: str) -> None:
    default = written(REMAT_OPTIONS[name].default)
    assert of_flags("--remat-option", f"{name}={default}") == Config() == Config.of(remat_options={name: default})


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"distance_base": 1, "longest_chain": 8}, (("distance_base", 1.0), ("longest_chain", 8))),
        ({"longest_chain": "8", "distance_base": "1.0"}, (("distance_base", 1.0), ("longest_chain", 8))),
        ({"reduction_ratio": "inf"}, (("reduction_ratio", math.inf),)),
        ({"recompute_materialized": "true"}, (("recompute_materialized", True),)),
        ({"longest_chain": "none"}, ()),
        ({"peaks": OTHER_PEAKS}, (("peaks", OTHER_PEAKS),)),
        (None, ()),
    ],
)
def test_options_are_read_by_their_types(given: Any, held: Any) -> None:
    config = Config.of(remat_options=given)
    assert config.remat_options == held
    assert [type(v) for _, v in config.remat_options] == [type(v) for _, v in held]
    assert {name: getattr(remat(config), name) for name, _ in held} == dict(held)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distance_bas": 1}, "remat_options has no 'distance_bas': did you mean distance_base"),
        ({"producer_input_weight": 1}, "remat_options has no 'producer_input_weight'.*choose from distance_base"),
        ({"distance_base": "far"}, "distance_base='far' is no number: pass one, such as 1.1"),
        ({"longest_chain": 1.5}, "longest_chain=1.5 is no whole number: pass one, or None"),
        ({"recompute_materialized": 3}, "is no switch: pass True or False"),
        ({"peaks": "an A100"}, "is no Peaks: pass one"),
        ({"distance_base": -1}, "remat: distance_base=-1.0 is no base; pass a number like 1.1"),
        ({"longest_chain": 0}, "forbids every recompute; pass 1 or more, or None"),
        (["distance_base"], "is no mapping: pass names and values"),
    ],
)
def test_bad_options_name_the_remedy(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Config.of(remat_options=given)


# --- surfaces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--memory-budget", "0.4"], {"memory_budget": 0.4}),
        (["--memory-budget", "2GiB"], {"memory_budget": "2GiB"}),
        (["--memory-budget", "off"], {}),
        (["--remat-option", "distance_base=1.0", "--remat-option", "longest_chain=8"],
         {"remat_options": {"distance_base": 1.0, "longest_chain": 8}}),
        (["--no-pass", "cat", "--pass", "remat"], {"cat": False}),
        (["--pass", "remat:longest_chain=8", "--remat", "0"], {"remat": 0, "remat_options": {"longest_chain": 8}}),
        (["--pass", "remat:memory_budget=0.4"], {"memory_budget": 0.4}),
        (["--pass", "remat:producer_input_weight=0"], {"remat": 0}),
        (["--pass", "freeze:patterns=h.*"], {"freeze": "h.*"}),
    ],
)  # fmt: skip
def test_flags_and_the_magic_say_the_same_as_python(flags: list[str], options: dict[str, Any]) -> None:
    expected = Config.of(**options)
    assert of_flags(*flags) == expected == parse(" ".join(flags))[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--remat-option", "distance_base"], "write NAME=VALUE, such as distance_base=1.0"),
        (["--remat-option", "distnce_base=1"], "did you mean distance_base"),
        (["--memory-budget", "much"], "is no budget"),
        (["--no-pass", "kat"], "did you mean cat"),
        (
            ["--no-pass", "memory_budget"],
            "--no-pass memory_budget: .* of the pass remat: write --memory-budget to set it",
        ),
        (["--pass", "remat_options"], "is an option of the pass remat: write --remat-option to set it, and leave"),
        (["--pass", "remat:longest_chian=8"], "remat has no 'longest_chian': did you mean longest_chain"),
        (["--pass", "cat:packing=x"], "cat has no 'packing': there is nothing to choose, leave it out"),
        (["--pass", "cat", "--no-pass", "cat"], "--pass cat and --no-pass cat contradict each other"),
        (["--pass", "cat", "--no-cat"], "--pass cat and --no-cat contradict each other"),
        (["--remat", "0", "--no-pass", "remat"], "--remat and --no-pass remat contradict each other"),
    ],
)
def test_bad_flags_name_the_remedy(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        of_flags(*flags)


def test_the_help_says_where_the_options_are_listed_each_with_its_default_and_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, PASS_OPTIONS)
    magic = parse.__globals__["_magic"].__doc__
    for shown in (parser.format_help(), magic):
        text = "".join(shown.split())
        assert "--memory-budgetSIZE" in text
        assert "`tracefusepasses`liststhem" in text
    assert main(["passes"]) == 0
    text = "".join(capsys.readouterr().out.split())
    for name, does in PASSES.items():
        assert "".join(f"{name}{does}".split()) in text
    for name, option in REMAT_OPTIONS.items():
        if option.is_text:
            default = "False" if option.default is False else written(option.default) or "none"
            assert "".join(f"{name}={default}: {option.help}".split()) in text
            assert read(option, default, "remat") == option.default
    assert "peaks=" not in text


CHOICES = [
    {"memory_budget": 0.4}, {"memory_budget": 2 * GIB}, {"remat": 0, "remat_options": {"longest_chain": 8}},
    {"remat_options": {"recompute_materialized": True, "distance_base": 1.0}, "save": "h.0", "cat": False},
]  # fmt: skip


@pytest.mark.parametrize("options", CHOICES)
def test_a_configuration_is_the_call_that_makes_it(options: dict[str, Any]) -> None:
    config = Config.of(**options)
    c = type("c", (), {"optimize": staticmethod(Config.of)})
    assert eval(config.as_code(), {"c": c}) == config
    assert Config.of(**json.loads(json.dumps(config_record(config), allow_nan=False))) == config, (
        "the view sends it back"
    )
    assert len({config, Config.of(**options), Config()}) == 2


# --- an instance in place of a switch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [Remat(), Remat(producer_input_weight=1.0, save=("h.0",)), Remat(longest_chain=8, distance_base=1.0),
     Remat(memory_budget=0.4, recompute_materialized=True), Remat(peaks=OTHER_PEAKS)],
    ids=str,
)  # fmt: skip
def test_a_remat_stands_for_its_options(given: Remat) -> None:
    config = Config.of(remat=given)
    assert remat(config) == given
    assert (
        Config.of(cat=False, memory_budget=0.9, remat_options={"longest_chain": 3}).changed(remat=given, cat=True)
        == config
    )


def test_options_of_a_built_in_pass_are_given_like_those_of_ones_own() -> None:
    given = {"longest_chain": "8", "producer_input_weight": 0, "memory_budget": "2GiB", "save": "h.0"}
    assert Config.of(remat=given) == Config.of(
        remat=0, memory_budget="2GiB", save="h.0", remat_options={"longest_chain": 8}
    )
    assert Config.of(freeze={"patterns": "h.*"}) == Config.of(freeze="h.*")
    assert Config.off().changed(remat={}) == Config.off().changed(remat=True)


def test_other_instances_stand_for_their_switches() -> None:
    assert Config.of(freeze=Freeze(("h.*",)), cat=Cat(), fuse=Fuse()) == Config.of(freeze="h.*")
    assert Config.off().changed(cat=Cat()).cat
    assert Config.of(remat=Remat(longest_chain=8), memory_budget=0.5) == Config.of(
        remat_options={"longest_chain": 8}, memory_budget=0.5
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cat": Remat()}, "is another pass: pass an instance of the one called cat"),
        ({"remat": Freeze()}, "is another pass"),
        ({"fuse": Fuse(dropout_threads=7)}, "finds out about the GPU itself: pass fuse=True"),
        ({"remat": Remat}, "is no weight"),
        ({"remat": {"longest_chian": 8}}, "remat has no 'longest_chian': did you mean longest_chain"),
        ({"cat": {"packing": 1}}, "cat has no 'packing': there is nothing to choose, leave it out"),
    ],
)
def test_an_instance_of_another_pass_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Config.of(**given)


def test_an_option_knows_its_pass() -> None:
    fields = {f.name for f in dataclasses.fields(Config)} - {"own"}
    assert {name for name in fields if PASS_OF.get(name, name) == "remat"} == {
        "remat",
        *(name for name, of in PASS_OF.items() if of == "remat"),
    }
    assert PASS_OF["logits_memory"] == "linear_cross_entropy"


# --- reading by type --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "value", "found"),
    [
        ((int,), "8", 8), ((int,), 8.0, 8), ((float,), 8, 8.0), ((int, float), "0.5", 0.5), ((int, float), "2", 2),
        ((str,), "a, b", "a, b"), ((tuple[str, ...],), "a, b", ("a", "b")), ((tuple[str, ...],), ["a"], ("a",)),
        ((tuple[str, ...],), "", ()), ((bool,), "off", False), ((int, type(None)), "", None),
        ((int, type(None)), "none", None),
        ((bool,), True, True), ((dict,), 3, OptionError), ((dict,), {}, OptionError), ((int,), "", OptionError),
        ((int,), True, OptionError), ((bool,), 1, OptionError), ((tuple[str, ...],), [1], OptionError),
        ((int,), None, OptionError),
    ],
)  # fmt: skip
def test_values_are_read_as_their_types(types: tuple[Any, ...], value: Any, found: Any) -> None:
    option = PassOption("one", types, None, "")
    if found is OptionError:
        with pytest.raises(OptionError, match=r"pass (one|a tuple|True|names|None)"):
            read(option, value, "my_pass")
        return
    assert read(option, value, "my_pass") == found
    assert type(read(option, value, "my_pass")) is type(found)


def test_a_pass_without_options_says_so() -> None:
    with pytest.raises(OptionError, match="leave it out"):
        read_all({"any": 1}, {}, "my_pass")
