"""The model of a step of several ranks, on schedules whose times are known: links, choices, waiting, memory, bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tracefuse.optimizers.errors import MeshError
from tracefuse.optimizers.overlap.links import LINKS, Link, Mesh, fitted, mesh
from tracefuse.optimizers.overlap.model import Modelled, modelled
from tracefuse.optimizers.overlap.options import Options, chosen
from tracefuse.optimizers.overlap.schedule import Collective, Part, Schedule

MB = 2**20
PLAIN = Link("plain", 1e12, 0.0, 10.0)
"""10 µs a call, and 1 µs for each megabyte (10 ** 6) that a rank sends."""


def machine(ranks: int = 2, link: Link = PLAIN) -> Mesh:
    return Mesh("made", ranks, "here", link, link)


def collective(name: str, role: str, nbytes: int, starts: int, needed: int, **given: object) -> Collective:
    """One that the program waits for at once, unless `waits` says otherwise."""
    kind = {"gather": "all_gather", "reduction": "all_reduce", "other": "all_reduce"}[role]
    made = Collective(
        name, kind, role, "0", 2, nbytes, name, name, "forward", (Part(nbytes, 0 if role == "gather" else starts),),
        starts, starts, needed, (needed,),
    )  # fmt: skip
    return replace(made, **given)  # type: ignore[arg-type]


def schedule(us: list[float], *collectives: Collective, backward_from: int = 0) -> Schedule:
    return Schedule(tuple(us), collectives, "made", backward_from)


def gathers(count: int, compute_us: float, nbytes: int) -> Schedule:
    """A forward of layers each of which gathers its parameters right before it computes."""
    found = [collective(f"layer{at}", "gather", nbytes, at, at) for at in range(count)]
    return schedule([compute_us] * count, *found, backward_from=count)


# --- links ------------------------------------------------------------------------------------------------------------


def test_an_all_reduce_sends_twice_what_a_gather_does() -> None:
    assert PLAIN.parts_us("all_gather", 8_000_000, 4) == (10.0, 6.0)
    assert PLAIN.parts_us("reduce_scatter", 8_000_000, 4) == (10.0, 6.0)
    assert PLAIN.parts_us("all_reduce", 8_000_000, 4) == (10.0, 12.0)
    assert PLAIN.parts_us("all_reduce", 8_000_000, 1) == (0.0, 0.0)


def test_short_messages_take_the_protocol_of_short_steps() -> None:
    link = LINKS["nvlink4"]
    latency, transfer = link.parts_us("all_reduce", 1000, 8)
    assert latency == pytest.approx(6.6 + 14 * 0.6)
    assert transfer == pytest.approx(2 * 2 * 7 / 8 * 1000 / 370.8e9 * 1e6)
    assert sum(link.parts_us("all_reduce", 10**9, 8)) == pytest.approx(8.4 + 14 * 3.4 + 2 * 7 / 8 * 1e9 / 370.8e9 * 1e6)


def test_a_mesh_is_read_with_the_gpus_own_nvlink_and_the_far_link() -> None:
    found = mesh("16xH200, nvlink, ib400")
    assert (found.ranks, found.gpu, found.near, found.far) == (16, "H200", LINKS["nvlink4"], LINKS["ib400"])
    assert (found.link(8), found.link(16)) == (LINKS["nvlink4"], LINKS["ib400"])
    assert mesh("8xa100,nvlink").near is LINKS["nvlink3"]


@pytest.mark.parametrize("text", ["H100", "8xH100", "1xH100,nvlink", "8xfoo,nvlink", "8xH100,wire", "8xL4,nvlink", ""])
def test_what_describes_no_machine_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshError, match="write 8xH100,nvlink"):
        mesh(text)


def test_a_link_is_fitted_to_what_calls_took() -> None:
    truth = Link("truth", 2e9, 0.0, 150.0)
    calls = [(kind, size, 4) for kind in ("all_reduce", "all_gather") for size in (10**5, 10**6, 10**7)]
    found = fitted("loopback", [(*call, sum(truth.parts_us(*call))) for call in calls])
    assert found.base_us == pytest.approx(150, rel=1e-6)
    assert found.bytes_per_s == pytest.approx(2e9, rel=1e-6)
    assert sum(found.parts_us("all_reduce", 5 * 10**6, 4)) == pytest.approx(
        sum(truth.parts_us("all_reduce", 5 * 10**6, 4))
    )
    with pytest.raises(MeshError, match="two sizes"):
        fitted("loopback", [("all_reduce", 100, 4, 10.0)] * 3)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_what_is_waited_for_at_once_is_exposed_in_full() -> None:
    found = modelled(gathers(3, 100.0, 40_000_000), machine())
    assert found.step_us == pytest.approx(3 * (100 + 10 + 20))
    assert found.exposed_us == pytest.approx(90)
    assert (found.computing_us, found.latency_only_us) == (300, pytest.approx(330))


def test_one_prefetched_gather_hides_behind_the_layer_before() -> None:
    made = gathers(3, 100.0, 40_000_000)
    assert modelled(made, machine(), Options(prefetch=1)).step_us == pytest.approx(30 + 300), (
        "only the first is waited for"
    )
    slow = gathers(3, 100.0, 340_000_000)  # 180 µs each
    assert modelled(slow, machine(), Options(prefetch=0)).step_us == pytest.approx(3 * 280)
    assert modelled(slow, machine(), Options(prefetch=1)).step_us == pytest.approx(3 * 180 + 100)
    assert modelled(slow, machine(), Options(prefetch=2)).step_us == pytest.approx(3 * 180 + 100), (
        "the link is the limit"
    )


def test_each_prefetched_gather_is_held_too() -> None:
    made = gathers(5, 100.0, 1000)
    held = [modelled(made, machine(), Options(prefetch=depth)).held_nbytes for depth in (0, 1, 2)]
    assert held == [1000, 2000, 3000]


def test_a_second_group_lets_gathers_pass_reductions_and_they_share_the_link() -> None:
    reduce_ = collective("reduce", "reduction", 200_000_000, 0, 3)
    gather = collective("gather", "gather", 80_000_000, 0, 1)
    made = schedule([50.0, 100.0, 100.0], reduce_, gather)
    one, two = (modelled(made, machine(), Options(prefetch=0, second_group=second)) for second in (False, True))
    # In line: the reduction takes 10 + 200, then the gather 10 + 40, for which computing has waited since 50.
    assert one.step_us == pytest.approx(260 + 200)
    # Beside one another: both talk from 60 on, at half the speed each, until the gather is over.
    assert [t.ended_us for t in two.collectives] == pytest.approx([250, 60 + 80])
    assert two.step_us == pytest.approx(140 + 200)


def test_exposed_time_and_computing_are_the_step() -> None:
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randrange(1, 12)
        found = []
        for at in range(draw.randrange(1, 8)):
            starts = draw.randrange(count + 1)
            role = draw.choice(["gather", "reduction", "other"])
            needed = draw.randrange(starts, count + 1)
            group, nbytes = draw.choice(["0", "1"]), draw.randrange(1, 10**9)
            found.append(collective(f"c{at}", role, nbytes, starts, needed, group=group))
        made = schedule([draw.uniform(0, 500) for _ in range(count)], *found, backward_from=count)
        for options in (Options(), Options(prefetch=2, second_group=True), Options(bucket_mb=100.0, prefetch=0)):
            one = modelled(made, machine(4), options)
            assert one.step_us == pytest.approx(one.computing_us + one.exposed_us)
            assert one.computing_us <= one.latency_only_us + 1e-6
            assert one.latency_only_us <= one.step_us + 1e-6
            assert all(t.ended_us >= t.began_us for t in one.collectives)
            faster = modelled(made, machine(4, replace(PLAIN, bytes_per_s=2e12)), options)
            assert faster.step_us <= one.step_us + 1e-6


# --- choices ----------------------------------------------------------------------------------------------------------


def gradients() -> Schedule:
    """A backward that makes four gradients of 1 MiB, reduced in one call of which computing needs the result at the end."""
    parts = tuple(Part(MB, at + 1) for at in range(4))
    one = collective("all", "reduction", 4 * MB, 4, 4, parts=parts, waits=4)
    return schedule([100.0] * 4, one)


def test_smaller_buckets_start_as_soon_as_their_gradients_are_there() -> None:
    made = chosen(gradients(), Options(bucket_mb=2.0))
    assert [(one.nbytes // MB, one.starts, one.waits) for one in made.collectives] == [(2, 2, 4), (2, 4, 4)]
    step = {size: modelled(gradients(), machine(), Options(bucket_mb=size)).step_us for size in (1.0, 2.0, 4.0)}
    each = MB / 1e6
    assert step[4.0] == pytest.approx(400 + 10 + 4 * each)
    assert step[2.0] == pytest.approx(400 + 10 + 2 * each)
    assert step[1.0] == pytest.approx(400 + 10 + each)


def test_too_small_buckets_pay_a_latency_each() -> None:
    slow = machine(link=replace(PLAIN, base_us=300.0))
    step = {size: modelled(gradients(), slow, Options(bucket_mb=size)).step_us for size in (1.0, 4.0)}
    assert step[1.0] > step[4.0]


def test_no_choice_changes_what_is_exchanged() -> None:
    for options in (Options(bucket_mb=2.0), Options(prefetch=3), Options(second_group=True), Options(bucket_mb=9.0)):
        for made in (gradients(), gathers(4, 10.0, 1000)):
            assert sum(one.nbytes for one in chosen(made, options).collectives) == sum(
                one.nbytes for one in made.collectives
            )
            assert chosen(made, options).us == made.us


def test_a_reduction_never_starts_before_its_gradients_are_there() -> None:
    for size in (0.1, 1.0, 3.0, 50.0):
        assert all(one.starts >= one.ready for one in chosen(gradients(), Options(bucket_mb=size)).collectives)


def resharded() -> Schedule:
    """A layer whose parameters are gathered in the forward, and again in the backward."""
    first = collective("w", "gather", 1000, 0, 0, read_at=(0,))
    again = collective("w", "gather", 1000, 2, 2, phase="backward", read_at=(2, 3))
    return schedule([100.0] * 4, first, again, backward_from=2)


def test_parameters_that_are_kept_are_gathered_once_and_held_longer() -> None:
    kept = chosen(resharded(), Options(reshard=False))
    assert [(one.phase, one.held_until) for one in kept.collectives] == [("forward", 3)]
    assert chosen(resharded(), Options(reshard=True)).collectives == resharded().collectives
    back = chosen(kept, Options(reshard=True))
    assert [(one.phase, one.starts, one.read_at) for one in back.collectives] == [
        ("forward", 0, (0,)),
        ("backward", 2, (2, 3)),
    ]


def test_what_tensor_parallel_layers_exchange_stays_as_it_was() -> None:
    made = schedule([10.0] * 3, collective("tp", "other", 1000, 1, 2))
    options = Options(bucket_mb=1.0, prefetch=2, reshard=False, second_group=True)
    assert chosen(made, options).collectives == made.collectives


def test_inner_groups_keep_their_size_and_outer_ones_grow() -> None:
    tensor = collective("tp", "other", 1000, 0, 0, group="tp", ranks=2)
    data = collective("w", "gather", 1000, 0, 1, group="data", ranks=2)
    found = modelled(schedule([10.0] * 2, tensor, data), mesh("16xH100,nvlink,ib400"))
    assert [one.ranks for one in found.collectives] == [2, 8]


@pytest.mark.parametrize("options", [{"bucket_mb": 0.0}, {"bucket_mb": -1.0}, {"prefetch": -1}])
def test_choices_that_are_none_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(MeshError, match="give"):
        Options(**options)  # type: ignore[arg-type]


def test_the_model_is_said_with_its_options() -> None:
    assert str(Options()) == "as recorded"
    assert str(Options(prefetch=0, second_group=True, reshard=False)) == "prefetch=0, second_group=True, reshard=False"
    assert isinstance(modelled(gradients(), machine()), Modelled)
