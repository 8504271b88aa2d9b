"""Passes and their options by name, for what names them before any pass is imported: the command line and its help."""

SESSION = ".tfz"
"""What the name of a session file ends in."""

PASSES = {
    "simplify": "removes dead code, repeated expressions, views of views, and casts and copies that change nothing",
    "freeze": "drops gradients that are not wanted, and what only they need",
    "merge_matmuls": "makes one matmul of many small ones by one matrix, or with summed products, as a loop over steps has",
    "cat": "replaces concatenations and slices of them by what they are made of",
    "linear_cross_entropy": "computes a head and its cross-entropy in chunks of rows, so that few logits are ever alive",
    "decompose": "takes cross-entropy, NLL and log-softmax apart into ops for the kernels of `fuse`, which it needs",
    "channels_last": "lets the images of convolutions lie as tensor cores read them, with copies where a region of them ends",
    "pad": "pads matmuls whose rows are not aligned, such as a vocabulary of 50,257, to a width that tensor cores load fast",
    "remat": "decides by a minimum cut what the forward saves and what the backward computes again",
    "optimizer_step": "does an optimizer's step on all parameters, clipping and averages with it, in a few launches",
    "fuse": "turns runs of pointwise ops, casts, views and reductions into Triton kernels; equal ones share one",
    "overlap": "lets collectives start as soon as what they send is there, and computing wait for them where it has to",
}
"""What each built-in pass does, in pipeline order."""

OFF_BY_DEFAULT = ("overlap",)
"""These change what ranks do together, so all ranks have to ask for them."""

PASS_OF: dict[str, str] = {"logits_memory": "linear_cross_entropy"} | dict.fromkeys(
    ("memory_budget", "peak_budget", "save", "recompute", "remat_options"), "remat"
)
"""Option -> the pass that it belongs to, where it is not called like that."""

OPTION_OF = {
    "freeze": {"patterns": "freeze"},
    "linear_cross_entropy": {"logits_memory": "logits_memory"},
    "remat": {"producer_input_weight": "remat"}
    | {name: name for name in ("memory_budget", "peak_budget", "save", "recompute")},
    "overlap": {},
}
"""The option of each field of a pass that has one of its own; the other fields of `Remat` are `remat_options`,
those of `Overlap` stand for its switch."""

DEFAULT_WEIGHT = 0.5
DEFAULT_LOGITS_MEMORY = 2**29
