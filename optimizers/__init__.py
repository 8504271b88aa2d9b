"""A trace, and every function from traces to traces, to text or to numbers.

Nothing here runs a kernel, reads a clock or touches a GPU; nothing here imports the rest of tracefuse.

The ground is `trace` (what a trace is), `ops` (what an operator is), `facts` (what is known of a value), `passes`, `rewrite`
(replacing one value by another safely), `verify`, `render`, `liveness` and `split`. Each of the twelve passes is a name:

    simplify        what computes nothing new
    freeze          gradients that nobody demands
    merge_matmuls   many small matmuls as one
    cat             concatenations and the slices of them
    linear_cross_entropy  a head and its loss without stored logits
    decompose       ATen ops as simpler ones that fuse
    channels_last   images of convolutions as tensor cores read them
    pad             rows that are not aligned
    remat           what the forward saves and what is computed again
    optimizer_step  an optimizer's step on all parameters at once
    fuse            ops that become one kernel
    overlap         when ranks exchange what

Passes stand on `costs` (what an op costs), `lowering` (what an op is inside a kernel) and `kernels` (a kernel as data and as
text). `formats` writes a trace as JSON or as a graph.
"""
