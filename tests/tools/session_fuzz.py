"""Damages session files in every way, loads and optimises each: `python session_fuzz.py FOLDER COUNT SEED`.

    bytes        of the file flipped, cut off, put in, spliced
    archive      members renamed, doubled, dropped, packed otherwise, blown up
    text         bytes of one JSON part, in a file that is otherwise whole
    structure    a part with something replaced, dropped, doubled, moved or taken from elsewhere

Prints what came of it as JSON. Only `SessionError` may leave `tracefuse.load`, and nothing may be executed, compiled,
imported, written or started on the way, as an audit hook sees; a file that still loads must hold a program that is one
function as text, and only `PassError` may leave its `optimize()`. What takes too long ends the process, with the place
where it was.
"""

from __future__ import annotations

import ast
import copy
import faulthandler
import json
import random
import resource
import struct
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.schema_check_mode  # which torch imports when it first meets some operators
from torch.fx.operator_schemas import _torchscript_type_to_python_type

import tracefuse
from tracefuse.errors import PassError, SessionError
from tracefuse.profiling.lanes import run_lanes
from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.replayed import Timeline

FORBIDDEN = (
    "exec", "compile", "import", "code.__new__", "marshal.loads", "pickle.find_class", "ctypes.dlopen", "ctypes.call_function",
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.mkdir",
    "os.chmod", "os.truncate", "shutil.rmtree", "shutil.copyfile", "socket.connect", "mmap.__new__",
)  # fmt: skip
HANG_S = 30
PARTS = ("session.json", "trace.json", "capture.json", "measured.json")


class Watch:
    """What an audit hook saw that loading must not do, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        writes = event == "open" and (any(c in str(arguments[1] or "") for c in "wax+") or (arguments[2] or 0) & 0o3)
        if writes or (event in FORBIDDEN and not _reads_a_schema(event)):
            self.seen.append(f"{event} {arguments!r:.200}")


def _reads_a_schema(event: str) -> bool:
    """Whether what runs is torch's reading of an operator's schema, whose types it evaluates: the first time for each."""
    return event in ("exec", "compile") and sys._getframe(2).f_code is _torchscript_type_to_python_type.__code__


# --- the file that is damaged -----------------------------------------------------------------------------------------


def whole_file(folder: Path) -> Path:
    """A small session with everything in it: times, a timeline, shares, inputs, a generator state, a guard."""
    x, weight = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)

    def run() -> torch.Tensor:
        y = torch.nn.functional.dropout(x @ weight, 0.5)
        first, second = (y * 2.0 if float(x[0, 0]) < 9 else y).split(1, dim=1)
        loss = torch.cat([second, first], dim=1).masked_fill(y > 0, float("-inf")).exp().sum()
        loss.backward()
        return loss

    capture = tracefuse.capture(run)
    variant = capture.optimize(memory_budget=0.5)
    variant.measure(budget_s=0.02)
    variant.timeline()
    variant.ablate(budget_s=0.02)
    variant.capture.measurements.timelines[variant.config, variant.config] = Timeline(
        "measured on a GPU", (of_a_gpu(),)
    )
    return capture.save(folder / "whole.tfz", inputs=True)


def of_a_gpu() -> ProgramTimeline:
    """The lanes of a recorded run, its idle time among them, with the first events."""
    run = tracefuse.load_timeline(Path(__file__).parents[1] / "timelines" / "item_in_loop.json.gz", window="window")
    program = run_lanes(run).program
    columns = ("start_us", "duration_us", "name", "value", "lane", "delay_us")
    return replace(program, **{name: getattr(program, name)[:50] for name in columns})


# --- damages ----------------------------------------------------------------------------------------------------------

Members = dict[str, bytes]


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, length = draw.randrange(len(out) or 1), draw.choice((1, 2, 4, 16, 100))
        kind = draw.randrange(5)
        if kind == 0 and out:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del out[at : at + (length if draw.random() < 0.8 else len(out))]
        elif kind == 2:
            out[at:at] = draw.randbytes(length)
        elif kind == 3:
            source = draw.randrange(len(data))
            out[at : at + length] = data[source : source + length]
        else:
            out[at : at + 4] = draw.choice((b"\xff" * 4, b"\0" * 4, struct.pack("<I", 1 << 31), b"PK\x01\x02"))
    return bytes(out)


def damaged_text(members: Members, draw: random.Random) -> Members:
    part = draw.choice(PARTS)
    return members | {part: damaged_bytes(members[part], draw)}


NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1.5, -0.0, 1e308, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63) - 1, 10**400, "", "x",
    "__class__", "__import__", "os.system('true')", "../../etc/passwd", "import os\nos.system('true')", '"""', "\0", "\ud800",
    "x" * 30_000, [], {}, [[]], {"": {}}, {"value": "loss"}, {"value": "__builtins__"}, {"tensor": 0}, {"tensor": 10**6},
    {"tensor": -1}, {"tuple": []}, {"tuple": [{"tensor": 0}]}, {"list": [1]}, {"float": "nan"}, {"float": "1e400"},
    {"dtype": "float32"}, {"dtype": "nn"}, {"device": "cuda:0"}, {"device": "cuda:999999999999"}, {"layout": "sparse_coo"},
    {"slice": [0, 1, 2]}, {"dict": [["a", 1]]}, {"complex": [1, 2]}, {"complex": [1]}, "getitem", "input", "backward",
    "aten.mm.default", "aten.from_file.default", "aten.add_.Tensor", "aten.__init__.default", "prims.mul.default", "cuda:0",
    "float64", "bool", "complex128", "lambda", "quantized.add.default", "torch.load",
)  # fmt: skip


def places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in `data`."""
    found, pending = [], [data]
    while pending:
        one = pending.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found += [(one, key) for key in keys]
        pending += [one[key] for key in keys if isinstance(one[key], (dict, list))]
    return found


def damaged_structure(parts: dict[str, Any], operators: list[str], draw: random.Random) -> dict[str, bytes]:
    name = draw.choices(PARTS, weights=(1, 12, 3, 8))[0]
    data = [copy.deepcopy(parts[name])]
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        _damage(data, operators, draw)
    return {name: json.dumps(data[0] if data else None).encode("utf-8", "surrogatepass")}


def _damage(data: list[Any], operators: list[str], draw: random.Random) -> None:
    known = places(data)
    if not known:
        return
    (container, key), (other, other_key) = draw.choice(known), draw.choice(known)
    kind = draw.randrange(8)
    if kind <= 2:
        container[key] = copy.deepcopy(draw.choice(NASTY))
    elif kind == 3:
        del container[key]
    elif kind == 4 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 4:
        container[draw.choice(("__class__", "code", "", "value"))] = container[key]
    elif kind == 5:
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 6:
        container[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(container[key])
    else:
        nodes = [one for one, at in known if at == "op"]
        if nodes:
            draw.choice(nodes)["op"] = draw.choice(operators)


def written(to: Path, members: Members, draw: random.Random | None = None) -> None:
    """A session file of `members`; with `draw`, an archive that no session has."""
    kind = draw.randrange(7) if draw else -1
    victim = draw.choice(list(members)) if draw else ""
    names = {
        victim: draw.choice(
            ("../../x", "/etc/x", "arrays/999", "arrays/00", "trace.json", "a\0b", "__init__.py", "é", " ")
        )
        if kind == 0 and draw
        else victim
    }
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in members.items():
            if kind == 1 and name == victim:
                continue
            if kind == 2 and name == victim:
                data = b" " * (40 << 20) if draw and draw.random() < 0.02 else b"[" * (2 << 20)
            packing = zipfile.ZIP_STORED if name.startswith("arrays/") else zipfile.ZIP_DEFLATED
            if kind == 3 and name == victim:
                packing = draw.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            archive.writestr(names.get(name, name), data, packing)
            if kind == 4 and name == victim:
                archive.writestr(name, data, packing)
        if kind == 5:
            archive.writestr("more", b"import os")
    if kind == 6 and draw:
        out = bytearray(to.read_bytes())
        entries = [at for at in range(len(out) - 4) if out[at : at + 4] == b"PK\x01\x02"]
        at = draw.choice(entries)
        field = draw.choice(
            (8, 10, 20, 24, 28, 42)
        )  # flags, packing, packed and unpacked size, length of the name, place
        value = draw.choice((1, 8, 99, 0xFFFF, 0xFFFFFFFF, 1 << 30))
        struct.pack_into(
            "<H" if field in (8, 10, 28) else "<I", out, at + field, value & (0xFFFF if field in (8, 10, 28) else ~0)
        )
        to.write_bytes(out)


# --- the run ----------------------------------------------------------------------------------------------------------


def wrong_passes(loaded: tracefuse.Capture) -> list[str]:
    """What came of the passes but programs and `PassError`s."""
    try:
        loaded.optimize()
    except PassError:
        return []
    except BaseException as error:
        return [f"optimize: {type(error).__name__}: {error!s:.300}"]
    return []


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    whole, hurt = whole_file(folder), folder / "hurt.tfz"
    data = whole.read_bytes()
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    parts = {name: json.loads(members[name]) for name in PARTS}
    operators = [
        name.replace("::", ".") + ("" if "." in name else ".default") for name in torch._C._dispatch_get_all_op_names()
    ]
    warnings.simplefilter("ignore")  # of names twice in an archive
    tracefuse.load(whole)  # what is imported and worked out once
    watch, draw = Watch(), random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kinds: dict[str, Callable[[], object]] = {
        "bytes": lambda: hurt.write_bytes(damaged_bytes(data, draw)),
        "archive": lambda: written(hurt, members, draw),
        "text": lambda: written(hurt, damaged_text(members, draw)),
        "structure": lambda: written(hurt, members | damaged_structure(parts, operators, draw)),
    }
    weights = (3, 1, 2, 6)
    found: dict[str, Any] = {"refused": 0, "loaded": 0, "wrong": [], "slowest_s": 0.0}
    for at in range(count):
        kind = draw.choices(list(kinds), weights)[0]
        hurt.unlink(missing_ok=True)  # some file systems write a file that is cut to nothing to the disk at once
        kinds[kind]()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        start = time.process_time()  # which no other process on the machine lengthens
        watch.is_on = True
        try:
            loaded = tracefuse.load(hurt)
        except SessionError:
            found["refused"] += 1
        except BaseException as error:
            found["wrong"].append(f"{at} {kind}: {type(error).__name__}: {error!s:.300}")
        else:
            found["loaded"] += 1
            watch.is_on = False
            if [type(one) for one in ast.parse(loaded.trace.code).body] != [ast.FunctionDef]:
                found["wrong"].append(f"{at} {kind}: more than a function")
            found["wrong"] += [f"{at} {kind}: {one}" for one in wrong_passes(loaded)]
        finally:
            watch.is_on = False
        found["slowest_s"] = max(found["slowest_s"], time.process_time() - start)
        if watch.seen:
            found["wrong"] += [f"{at} {kind}: {one}" for one in watch.seen]
            watch.seen.clear()
    faulthandler.cancel_dump_traceback_later()
    found["grown_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
