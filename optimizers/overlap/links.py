"""Links between GPUs: what a collective takes on one, by latency and bandwidth, from data sheets or fitted to measured calls.

A ring is modelled, which all sizes can take: `n` ranks pass their parts on in `n - 1` steps, and twice as many for an
all-reduce, so that each rank sends `(n - 1) / n` of all bytes, or twice that. A call takes

    base + steps * step + sent / bandwidth

for the better of two protocols: one of full bandwidth, and one whose steps are short and whose bandwidth is half. Trees and
switches that reduce (NVLS) are not modelled; where those are faster, the model says too much.

Sources. Bandwidths are what NCCL plans with (github.com/NVIDIA/nccl, src/graph/topo.h): 20 GB/s for each of the 12 links of
an A100, 20.6 for each of the 18 of an H100 or H200, 40.1 for each of the 18 of a B200; 12 for PCIe gen 3 x16, of which gen 4
and 5 have twice and four times as much; 12 for a network of 100 Gb/s. NVIDIA's data sheets promise more, in one direction 300,
450 and 900 GB/s of NVLink. Latencies are those of NCCL's own model of rings (src/graph/tuning.cc): 8.4 µs a call and 3.4 µs a
step by NVLink, 5.7 by PCIe, 14 by a network, and by the short protocol (LL) 6.6 µs a call and 0.6, 1.0 and 2.7 µs a step, at
half the bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.errors import MeshError

BASE_US, SHORT_BASE_US, SHORT_SHARE = 8.4, 6.6, 0.5


@dataclass(frozen=True)
class Link:
    """What connects ranks: bytes a second that a rank can send while it receives as many, µs of a call and of one step of a
    ring; and the same of its protocol for short messages, which has none of its own where `short_step_us` is None."""

    name: str
    bytes_per_s: float
    step_us: float
    base_us: float = BASE_US
    short_step_us: float | None = None
    source: str = ""

    def parts_us(self, kind: str, nbytes: int, ranks: int) -> tuple[float, float]:
        """µs of latency and µs of transfer of a collective. `nbytes` are those of the whole tensor: all that is gathered, all
        that is reduced before it is scattered."""
        if ranks < 2 or kind == "barrier":
            return 0.0, 0.0
        steps, share = _ring(kind, ranks)
        sent_us = share * nbytes / self.bytes_per_s * 1e6
        ways = [(self.base_us + steps * self.step_us, sent_us)]
        if self.short_step_us is not None:
            ways.append((SHORT_BASE_US + steps * self.short_step_us, sent_us / SHORT_SHARE))
        return min(ways, key=sum)


def _ring(kind: str, ranks: int) -> tuple[int, float]:
    """The steps of a collective, and the share of its bytes that a rank sends."""
    if kind == "all_reduce":
        return 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    if kind in ("broadcast", "reduce", "receive"):
        return 1, 1.0
    return ranks - 1, (ranks - 1) / ranks


def _link(name: str, gb_per_s: float, step_us: float, short_step_us: float) -> Link:
    return Link(name, gb_per_s * 1e9, step_us, BASE_US, short_step_us, "as NCCL plans a ring")


LINKS = {
    "nvlink3": _link("NVLink 3", 12 * 20.0, 3.4, 0.6),
    "nvlink4": _link("NVLink 4", 18 * 20.6, 3.4, 0.6),
    "nvlink5": _link("NVLink 5", 18 * 40.1, 3.4, 0.6),
    "pcie4": _link("PCIe gen 4 x16", 24.0, 5.7, 1.0),
    "pcie5": _link("PCIe gen 5 x16", 48.0, 5.7, 1.0),
    "ib200": _link("200 Gb/s a GPU", 24.0, 14.0, 2.7),
    "ib400": _link("400 Gb/s a GPU", 48.0, 14.0, 2.7),
}
"""The links that a mesh can be described with."""

_NVLINK = {"A100": "nvlink3", "H100": "nvlink4", "H200": "nvlink4", "B200": "nvlink5"}
_MESH = re.compile(r"(?P<ranks>\d+)x(?P<gpu>[^,]+),(?P<link>\w+)(,(?P<far>\w+))?")
HERE = "here"
HOST = 8
"""GPUs of one host, between which the first link of a mesh goes."""


@dataclass(frozen=True)
class Mesh:
    """A described machine: so many ranks of a GPU, "here" for the one that times are of, with a `near` link inside a host of
    eight, and a `far` one between hosts. `beside` is the share of its speed that computing keeps beside a collective, which
    takes multiprocessors of a GPU, or cores, for itself."""

    text: str
    ranks: int
    gpu: str
    near: Link
    far: Link
    beside: float = 1.0

    def link(self, ranks: int) -> Link:
        """The link that decides what a group of so many ranks takes."""
        return self.near if ranks <= HOST else self.far


def mesh(text: str, links: Mapping[str, Link] = LINKS) -> Mesh:
    """The machine that a text such as "8xH100,nvlink" or "16xH200,nvlink,ib400" describes. Raises `MeshError`."""
    match = _MESH.fullmatch(text.replace(" ", ""))
    known = {name.casefold(): name for name in (*TARGETS, HERE)}
    names = [*links, *(["nvlink"] if links is LINKS else [])]
    remedy = (
        f"write 8xH100,nvlink: ranks, one of {', '.join(known.values())}, and one of {', '.join(names)}; two links for "
    )
    remedy += f"more than {HOST} ranks"
    if match is None or match["gpu"].casefold() not in known or int(match["ranks"]) < 2:
        raise MeshError(f"{text!r} describes no machine of two ranks or more: {remedy}")
    gpu = known[match["gpu"].casefold()]
    found = []
    for name in (match["link"], match["far"] or match["link"]):
        name = _NVLINK.get(gpu, name) if name == "nvlink" else name
        if name not in links:
            raise MeshError(f"{name!r} in {text!r} is no link of {gpu}: {remedy}")
        found.append(links[name])
    return Mesh(text, int(match["ranks"]), gpu, *found)


def fitted(name: str, points: Iterable[tuple[str, int, int, float]]) -> Link:
    """The link on which measured calls took what they took with the least relative errors: `points` are the kind, the bytes,
    the number of ranks and the µs of each, of two sizes or more. One latency a call and one bandwidth are fitted. Raises
    `MeshError`."""
    rows = list(points)
    sent = np.array([_ring(kind, ranks)[1] * nbytes for kind, nbytes, ranks, _ in rows])
    us = np.array([one for *_, one in rows])
    if len(set(sent.tolist())) < 2:
        raise MeshError("a link is fitted to calls of two sizes or more: measure another size")
    (base_us, per_byte), *_ = np.linalg.lstsq(np.stack([1 / us, sent / us], axis=1), np.ones(len(us)), rcond=None)
    if base_us < 0 or per_byte <= 0:
        base_us, per_byte = 0.0, float((sent / us).sum() / ((sent / us) ** 2).sum())
    return Link(name, 1e6 / per_byte, 0.0, max(float(base_us), 0.0), None, f"fitted to {len(rows)} measured calls")
