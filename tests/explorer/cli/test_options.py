"""One table of options, read alike by Python, the magic and the command line."""

from __future__ import annotations

import argparse
from itertools import product

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.magic_arguments import parse_argstring

import tracefuse as tf
from tracefuse.cli.choices import configuration
from tracefuse.cli.flags import (
    DEMO_OPTIONS,
    MAGIC_OPTIONS,
    OPTIONS,
    SCRIPT_OPTIONS,
    add_arguments,
    magic_arguments,
    values,
)
from tracefuse.config import PASSES, Config
from tracefuse.config.names import OFF_BY_DEFAULT
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.optimizers.liveness import saved_bytes


def of_flags(*flags: str) -> Config:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, OPTIONS)
    return configuration(parser.parse_args(flags))


@magic_arguments((*OPTIONS, *MAGIC_OPTIONS))
def tracefuse(line: str) -> argparse.Namespace:
    """A magic."""
    return parse_argstring(tracefuse, line)


def test_the_table_covers_the_configuration() -> None:
    assert {o.name: o.default for o in OPTIONS} | {"own": ()} == Config().__dict__


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"remat": 0}, "remat", 0.0),
        ({"remat": True}, "remat", 0.5),
        ({"remat": False}, "remat", None),
        ({"remat": "off"}, "remat", None),
        ({"remat": "0.25"}, "remat", 0.25),
        ({"cat": None}, "cat", False),
        ({"cat": "off"}, "cat", False),
        ({"freeze": "h.*, head"}, "freeze", ("h.*", "head")),
        ({"freeze": True}, "freeze", ()),
        ({"freeze": False}, "freeze", None),
        ({"freeze": None}, "freeze", None),
        ({"freeze": "h.*"}, "freeze", ("h.*",)),
        ({"freeze": ["h.*.mlp.*", "head"]}, "freeze", ("h.*.mlp.*", "head")),
        ({"save": "h.0"}, "save", ("h.0",)),
        ({"recompute": None}, "recompute", ()),
    ],
)
def test_values_are_accepted_in_the_forms_people_write(given: dict, field: str, value: object) -> None:
    config = Config.of(**given)
    assert getattr(config, field) == value
    assert type(getattr(config, field)) is type(value)
    assert config == Config(**{field: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"remat": 2}, "from 0 to 1"),
        ({"remat": -0.1}, "from 0 to 1"),
        ({"remat": float("nan")}, "from 0 to 1"),
        ({"remat": "much"}, "from 0 to 1"),
        ({"cat": "maybe"}, "cat='maybe' is no switch: pass True or False"),
        ({"cat": 1}, "cat=1 is no switch: pass True or False"),
        ({"save": 3}, "save=3 is no list of names: pass names or globs that are not empty, such as"),
        ({"freeze": 3}, "pass names or globs that are not empty, such as .* or None"),
        ({"freeze": ["h", ""]}, "that are not empty"),
        ({"freeze": ["h", 1]}, "pass names or globs"),
        ({"logits_memory": 0.4}, "logits_memory=0.4 is no number of bytes: pass bytes, such as 512MiB"),
        ({"remta": 0}, "did you mean remat"),
        (
            {"whatever": 0},
            "choose from simplify, freeze, merge_matmuls, cat, linear_cross_entropy, logits_memory, decompose, channels_last, "
            "pad, remat, memory_budget, "
            "peak_budget, save, recompute, remat_options, optimizer_step, fuse",
        ),
    ],
)
def test_bad_options_name_the_remedy(given: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Config.of(**given)
    assert issubclass(OptionError, TracefuseError)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--no-simplify", "--no-cat", "--no-fuse"], {"simplify": False, "cat": False, "fuse": False}),
        (["--no-decompose"], {"decompose": False}),
        (["--no-pad"], {"pad": False}),
        (["--no-linear-cross-entropy"], {"linear_cross_entropy": False}),
        (["--logits-memory", "64MiB"], {"logits_memory": "64MiB"}),
        (["--remat", "0"], {"remat": 0}),
        (["--remat", "off"], {"remat": None}),
        (["--no-remat"], {"remat": None}),
        (["--freeze", "a.*", "--freeze", "b"], {"freeze": ["a.*", "b"]}),
        (["--no-freeze"], {"freeze": False}),
        (["--save", "h.0", "--recompute", "h.1"], {"save": "h.0", "recompute": "h.1"}),
    ],
)
def test_flags_and_magic_say_the_same_as_python(flags: list[str], options: dict) -> None:
    assert of_flags(*flags) == Config.of(**options)
    assert configuration(tracefuse(" ".join(flags))) == Config.of(**options)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="contradict"):
        of_flags("--remat", "1", "--no-remat")


def test_a_bad_flag_names_the_remedy_in_flags() -> None:
    for text in ("7", "much"):
        with pytest.raises(OptionError, match=rf"^--remat {text} is no weight: pass a number from 0 to 1, or off"):
            of_flags("--remat", text)
    with pytest.raises(OptionError, match=r"^remat=7 is no weight: pass a number from 0 to 1, or None"):
        Config.of(remat=7)
    with pytest.raises(OptionError, match=r"^--memory-budget much is no budget: pass a fraction such as 0.4, or bytes"):
        of_flags("--memory-budget", "much")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bogus", r"--bogus: see %%tracefuse\?$"),
        ("--outptu=c", r"--outptu=c: did you mean --output\? see %%tracefuse\?$"),
        ("--no-fuze", r"--no-fuze: did you mean --no-fuse\? see %%tracefuse\?$"),
        ("--budget-s 0", r"0 is no time: pass seconds above 0, such as 5: see %%tracefuse\?$"),
        ("--budget-s soon", r"soon is no time: pass seconds above 0"),
    ],
)
def test_the_magic_says_what_was_meant_and_where_to_look(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tracefuse(line)


def test_the_magic_and_the_demo_measure_equally_long() -> None:
    (magic,) = [o for o in MAGIC_OPTIONS if o.name == "budget_s"]
    assert magic in DEMO_OPTIONS


def test_the_magic_has_options_of_its_own() -> None:
    default = {"output": None, "measure": True, "html": None, "train_all": False, "budget_s": 5.0, "cuda_graph": False}
    default |= {"tune": False, "peer": (), "target": None, "step": None}
    assert values(tracefuse(""), MAGIC_OPTIONS) == default
    assert values(tracefuse("--step 2"), MAGIC_OPTIONS) == {**default, "step": 2}
    assert values(tracefuse("-o run --no-measure"), MAGIC_OPTIONS) == {**default, "output": "run", "measure": False}
    assert values(tracefuse("--html page.html"), MAGIC_OPTIONS) == {**default, "html": "page.html"}
    assert values(tracefuse("--train-all"), MAGIC_OPTIONS) == {**default, "train_all": True}
    for spelling in ("--budget-s", "--budget"):
        assert values(tracefuse(f"{spelling} 0.5"), MAGIC_OPTIONS) == {**default, "budget_s": 0.5}
    assert values(tracefuse("--cuda-graph"), MAGIC_OPTIONS) == {**default, "cuda_graph": True}
    assert values(tracefuse("--tune"), MAGIC_OPTIONS) == {**default, "tune": True}
    assert "--remat WEIGHT" in (tracefuse.__doc__ or "")


def test_a_configuration_prints_as_the_call_that_makes_it() -> None:
    class c:
        optimize = staticmethod(Config.of)

    assert Config().as_code() == "c.optimize()"
    assert Config.of(remat=0).as_code() == "c.optimize(remat=0.0)"
    choices = product((True, False), (None, (), ("h.*",)), (True, False), (None, 0.0, 0.5), ((), ("h.0",)))
    for simplify, freeze, cat, remat, save in choices:
        config = Config(simplify=simplify, freeze=freeze, cat=cat, remat=remat, save=save)
        assert eval(config.as_code(), {"c": c}) == config


def test_passes_are_in_pipeline_order() -> None:
    def without(*off: str) -> list[str]:
        return [name for name in PASSES if name not in off]

    order = "simplify freeze merge_matmuls cat linear_cross_entropy decompose channels_last pad remat optimizer_step"
    assert [p.name for p in Config.of(overlap=True).passes()] == list(PASSES) == [*order.split(), "fuse", "overlap"]
    assert [p.name for p in Config().passes()] == without(*OFF_BY_DEFAULT)
    assert [p.name for p in Config.of(cat=False, remat=None).passes()] == without("cat", "remat", *OFF_BY_DEFAULT)
    assert [p.name for p in Config.of(decompose=False, pad=False).passes()] == without(
        "decompose", "pad", *OFF_BY_DEFAULT
    )
    assert Config.off().passes() == []


def test_nothing_is_taken_apart_where_nothing_is_fused() -> None:
    assert Config.of(fuse=False).decompose
    assert [p.name for p in Config.of(fuse=False).passes()] == [
        "simplify",
        "freeze",
        "merge_matmuls",
        "cat",
        "linear_cross_entropy",
        "channels_last",
        "pad",
        "remat",
        "optimizer_step",
    ]


def test_a_pass_says_whether_it_runs_and_what_it_needs() -> None:
    off = dict.fromkeys(OFF_BY_DEFAULT, "off")
    assert {name: Config().state(name) for name in PASSES} == dict.fromkeys(PASSES, "on") | off
    assert {name: Config().switched(name).state(name) for name in off} == dict.fromkeys(off, "on")
    assert {Config.off().state(name) for name in PASSES if name != "decompose"} == {"off"}
    assert Config.of(decompose=False).state("decompose") == "off"
    assert Config.of(fuse=False).state("decompose") == "off: needs fuse"
    for config in (Config(), Config.off(), Config.of(fuse=False), Config.of(remat=0.0, freeze=())):
        assert [name for name in PASSES if config.state(name) == "on"] == [p.name for p in config.passes()]


def test_remat_says_what_it_is_worth_without_kernels() -> None:
    said = Config.of(fuse=False).note("remat")
    assert said == "without fuse, what it recomputes runs as ops of its own: it saves memory and costs time"
    for config in (Config(), Config.off(), Config.of(fuse=False, remat=None)):
        assert {config.note(name) for name in PASSES} == {""}


def test_remat_without_kernels_saves_memory_and_costs_time() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    capture = tf.capture(lambda: x.sin().exp().cos().tanh().sum().backward())
    one, other = (capture.optimize(fuse=False, remat=weight).trace for weight in (None, 0.0))
    assert saved_bytes(other) < saved_bytes(one)
    assert sum(modelled(other).us.values()) > sum(modelled(one).us.values())


def test_options_without_effect_are_known() -> None:
    given = {"memory_budget": 0.5, "recompute": "h.*"}
    assert Config.of(**given).idle == Config.of(remat=None).idle == Config.off().idle == ()
    assert Config.of(**given, remat=None).idle == ("memory_budget", "recompute")


def test_what_needs_a_gpu_and_what_a_pass_does_is_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, (*DEMO_OPTIONS, *OPTIONS))
    text = "".join(parser.format_help().split())  # argparse breaks lines at hyphens too
    assert text.count("needsaCUDAGPU") == 2
    for name, does in PASSES.items():
        assert "".join(f"switch off the pass `{name}`, which {does}".split()) in text


def test_the_help_names_all_gpus_that_prices_are_known_for() -> None:
    (told,) = [one.help for one in SCRIPT_OPTIONS if one.name == "target"]
    *names, last = TARGETS
    assert f": {', '.join(names)} or {last}; " in told


def test_pass_options_reach_the_passes() -> None:
    passes = {p.name: p for p in Config.of(freeze="h.*", remat=0, save="h.0", recompute="h.1").passes()}
    assert passes["freeze"].patterns == ("h.*",)
    assert passes["remat"].producer_input_weight == 0.0
    assert (passes["remat"].save, passes["remat"].recompute) == (("h.0",), ("h.1",))
