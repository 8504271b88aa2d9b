"""A dropout's mask inside a kernel: one Philox call per element in the text, one per four elements in the machine code.

`philox.word_of` on the element's place gives thread, block and lane as index expressions; `philox_word`, a function that
stands above the kernels which call it, turns them into the word. It is called for every element and then one of the four
words is taken, which reads like four times too much work. But neighbours have equal threads and blocks, and where a
program's thread holds neighbours, as it does wherever loads are vectors, LLVM sees that and draws once for them: on sm_90
dropout and a residual in bf16 are 27 instructions per element, where memory at 3 TB/s leaves an H100 time for 59. Odd
sizes, whose neighbours belong to different threads of ATen's (`vector` 1), do take a call per element: 79 instructions.

Joining four blocks of words into one (`tl.join`) costs more: the result lies in another layout than the loads and goes
through shared memory. Places are unsigned, since a division of signed ones by 4 is no shift.
"""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.formulas.philox import word_of
from tracefuse.optimizers.lowering.indexing import ravel, row_major, variable
from tracefuse.optimizers.lowering.lowering import Guards, Lowering, NotFusible, Value, index_block
from tracefuse.optimizers.lowering.random_ops import MASK
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import shape_of

PHILOX_WORD = '''@triton.jit
def philox_word(state_ptr, thread, block, lane):
    """The 32-bit word that ATen's CUDA kernels draw: Philox4x32-10, counter (offset // 4 + block, thread), key seed."""
    seed = tl.load(state_ptr)
    counter = (tl.load(state_ptr + 1) >> 2) + block
    a, b, c, d = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), thread.to(tl.uint32), 0)
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
'''


def _mask(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    if args["state"] not in self.pointers:
        raise NotFusible(node, "its state is drawn on the host")
    strides = args["stride"] if args["vector"] > 1 else row_major(shape_of(node))
    offset = ravel(at, strides)
    wide = "uint64" if offset.upper >= 2**31 else "uint32"
    place = self.emit(node, f"{index_block(offset)}.to(tl.{wide})", wide, offset.lanes, "place")
    where = variable(place.text, offset.upper + 1, offset.lanes)
    thread, block, lane = word_of(where, args["threads"], args["vector"])
    parts = ", ".join([self.pointers[args["state"]], index_block(thread), block.text, lane.text])
    word = self.emit(node, f"philox_word({parts})", "uint32", offset.lanes, "word")
    return self.emit(node, f"{word.text} < {args['keep_below']}", "int1", offset.lanes, "keep")


MASKS = {MASK: _mask}
