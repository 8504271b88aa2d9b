"""What a trace is, and every function from traces to traces, to text or to numbers.

Nothing here runs a kernel, reads a clock or touches a GPU; nothing here imports the rest of tracefuse.

`ops` says what an operator is, `memory` which storage a value lies in, `rewrite` replaces one value by another safely. Each
pass is the file of its name, and what it is made of is one file each:

    freeze  narrowing             switches off outputs that nothing reads
            frozen_costs          what each parameter's gradient costs
    cat     cat_forms             stacks and nested concatenations as one
            cat_strands           operands traced back to ranges of a base
            cat_runs              consecutive ranges through the same ops
            cat_replays           those ops once, on the base
            cat_sums              sums of padded values as one concatenation
            cat_paddings          what is zero but for segments
            cat_pushes            an op on each part instead
            cat_readers           reductions that read the parts
            packed_attention      attention's backward into one buffer
    pad     alignment             which dimension lies along rows that are not aligned
    remat   choice, mincut        kept values as a minimum cut; what solves it
            crossing              what may cross to the backward
            pins                  what you want saved or recomputed
            budget, filling       the fewest seconds within a budget; what is left of it, spent
            forecast              the static peak, before any edit
            schedule              copies, run as late as possible
            between, borders      values recomputed between regions; what crosses their borders
            normalizers           statistics that fit only their values
            checkpoints           what the program recomputes itself
            dropout_products      a dropout as operand times mask
            reasons               why each value is kept
            pareto, weights       memory against time, and what a weight costs, as data
    fuse    regions               what may share a kernel
            merging, duplicating  what saves bytes
            blocking, layout      how programs share out the elements; of rows and columns
                                  that are reduced, row_layouts and column_layouts
            lowering, loops       the text, pulled from the outputs through views; what stands in a loop
            functions, triton     one launch or two; the file
"""
