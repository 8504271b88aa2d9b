"""Kernels over lists find their tensors by tables in the GPU's memory; this is the text that makes them, once in a file.

    table   a row for each tensor: its elements; how many of them are read 16 bytes at a time; its address in each list
    parts   how many programs there are; for each, the row of its tensor and which part of the tensor it does

A table is made when one of the addresses is new, and copied from pinned memory, so that the host does not wait. A CUDA graph
repeats that copy at each replay: it reads pinned memory that was set aside at an earlier launch, and that nothing else ever
writes to; its parts, which only sizes decide, it finds made. Each graph copies for itself, as another one may never run. Who
records a graph and sets `copies_behind` to a list makes the copies that are found there once, behind the recording: the GPU
waits before and behind a copy among kernels.
"""

from __future__ import annotations

TABLES = '''_tables = {}  # What a kernel over lists was launched on -> its tables in the GPU's memory, the latest ones.
_parts = {}  # Sizes of tensors -> which part of which tensor each program does.
_set_aside = {}  # Rows and columns of a table -> pinned memory and memory of the GPU for the next CUDA graph's.
_wanting = {}  # The same -> how many such tables were made outside of CUDA graphs.
_held = []  # What CUDA graphs read: they keep nothing alive themselves.
copies_behind = None  # A list: tables of the graph that is being recorded, each with what is to be copied there behind it.


def tables_of(kernel, size, elements, *lists):
    """The table of `lists`, the parts of `size` elements that programs do, and how many programs there are.

    The first `elements` lists have tensors of the shape that is worked on.
    """
    device = lists[0][0].device
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    stream = _stream(device.index) if device.type == "cuda" else 0
    sizes = tuple([t.numel() for t in lists[0]])
    addresses = tuple([tuple([t.data_ptr() for t in one]) for one in lists])
    key = (id(kernel), stream, size, sizes, addresses, is_captured)
    found = _tables.get(key)
    if device.type == "cuda" and not is_captured:
        _set_aside_for((len(sizes), len(lists) + 2), device, found is None)
    if found is None:
        parts, programs = _parts_of(size, sizes, device, is_captured)
        rows = [
            [n, n if all(a % 16 == 0 for a in row[:elements]) else 0, *row]
            for n, row in zip(sizes, zip(*addresses, strict=True), strict=True)
        ]
        host = torch.tensor(rows, dtype=torch.int64)
        pinned, table = _taken(host, device) if is_captured else (None, _copied(host, device))
        found = _tables[key] = pinned, table, parts, programs
        if len(_tables) > 1024:
            del _tables[next(iter(_tables))]
    pinned, *tables = found
    if is_captured:
        if copies_behind is None:
            tables[0].copy_(pinned, non_blocking=True)
        else:
            copies_behind.append((tables[0], pinned))
        _held.append(found)
    return tables


def written_over(results, targets):
    """The results of ATen's ops, those with a target where a kernel would have written them: over its tensors."""
    pairs = zip(results, targets, strict=True)
    return tuple([new if old is None else [o.copy_(n) for o, n in zip(old, new, strict=True)] for new, old in pairs])


def _parts_of(size, sizes, device, is_captured):
    found = _parts.get((size, sizes, device))
    if found is None:
        if is_captured:
            raise RuntimeError("a kernel over lists is captured before it ran: run the program once, then capture it")
        counts = torch.tensor([-(-n // size) for n in sizes])
        programs = int(counts.sum())
        before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        pairs = torch.stack([rows, torch.arange(programs) - before], 1).flatten()
        host = torch.cat([torch.tensor([programs]), pairs]).to(torch.int32)
        found = _parts[size, sizes, device] = _copied(host, device), programs
    return found


def _set_aside_for(shape, device, is_new):
    """See to it that each launch with such a table finds memory in the next CUDA graph, also where one took it before."""
    place = shape, torch.int64, device
    wanted, waiting = _wanting.get(place, 0) + is_new, _set_aside.setdefault(place, [])
    _wanting[place] = min(wanted, 256)
    while len(waiting) < _wanting[place]:
        table = torch.empty(shape, dtype=torch.int64, device=device)
        waiting.append((torch.empty(shape, dtype=torch.int64, pin_memory=True), table))


def _taken(host, device):
    """Pinned memory that stays as it is, with what `host` has, and memory of the GPU for it, of what was set aside."""
    waiting = _set_aside.get((host.shape, host.dtype, device))
    if not waiting:
        raise RuntimeError("a kernel over lists is captured before it ran: run the program once, then capture it")
    pinned, table = waiting.pop()
    return pinned.copy_(host), table


def _copied(host, device):
    """`host` on `device`."""
    if device.type != "cuda":
        return host
    waiting = _set_aside.setdefault((host.shape, host.dtype, device), [])
    if host.dtype == torch.int64 and len(waiting) < 256:
        waiting.append((host.pin_memory(), torch.empty(host.shape, dtype=host.dtype, device=device)))
    return host.pin_memory().to(device, non_blocking=True)
'''


def table_support(text: str) -> str:
    """What the text of kernels needs above it if any of them is over lists."""
    return TABLES if "tables_of(" in text or "written_over(" in text else ""
