"""The table of all kinds of findings: a stable id, one sentence, and the passes that can mend it.

An id never changes its meaning: a comment `# tracefuse: ignore[tf32-off]`, a script and a session file may hold it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of finding: `says` is what is wrong in one sentence, `mended_by` are the passes that can mend it in the trace,
    `of_run` says that a profile of a run shows it, and no trace, `in_the_line` that the fix is to write its line otherwise:
    in a library that is its authors' to do, `by_passes_alone` that no line can be written otherwise to mend it. What is told
    `in_part` is the time of all that it is about, of which nobody knows how much can be spared. Where it `spares_launches`,
    mending it leaves fewer kernels, and else the same ones, each of which is faster. `by_calling` is the call that mends it,
    where a finding has code with it."""

    says: str
    mended_by: tuple[str, ...] = ()
    of_run: bool = False
    in_the_line: bool = False
    by_passes_alone: bool = False
    in_part: bool = False
    spares_launches: bool = True
    by_calling: str = ""


KINDS: dict[str, Kind] = {
    # What moves between the host and the GPU.
    "cpu-leaf": Kind("A leaf lies on the CPU, and every backward copies its gradient there."),
    "moved-each-step": Kind("Every forward moves the same data between devices."),
    "one-name-two-copies": Kind("Dtype casts and device moves have one name in a profile."),
    "host-sync": Kind("Python reads a value, a shape or a copy, and the host waits for the GPU."),
    # Attention.
    "attention-by-hand": Kind(
        "Attention in single ops sends its scores through memory.",
        ("fuse",),
        by_calling="F.scaled_dot_product_attention",
    ),
    "attention-math-backend": Kind("torch runs attention as its math backend.", ("fuse",)),
    "attention-in-float32": Kind(
        "Attention in single ops computes in float32 among values of half precision.", ("fuse",), in_the_line=True
    ),
    # Precision.
    "tf32-off": Kind(
        "Matmuls of float32 run without tensor cores, since TF32 is off.",
        spares_launches=False,
        by_calling='set_float32_matmul_precision("high")',
    ),
    "weights-cast-each-step": Kind("Every forward casts the same weights, and every backward casts their gradients."),
    "cast-round-trip": Kind(
        "A value of half precision is cast to float32 and back.", ("simplify", "fuse"), in_the_line=True
    ),
    "cast-again": Kind("A value is cast to one dtype several times.", ("simplify", "fuse"), in_the_line=True),
    "norm-in-float32": Kind("A norm runs in float32 between two casts.", ("fuse",), in_the_line=True),
    "dropout-in-float32": Kind("Dropout runs in float32 between two casts.", ("fuse",), in_the_line=True),
    "logits-in-float32": Kind("Logits of half precision are cast to float32 as a whole.", ("fuse",), in_the_line=True),
    "float64-leak": Kind("Ops compute in float64 in a program whose parameters are not.", spares_launches=False),
    # Layout.
    "not-channels-last": Kind(
        "cuDNN copies images around convolutions, since they do not lie in channels_last.",
        ("channels_last",),
        spares_launches=False,
    ),
    "needless-copy": Kind("A copy makes a layout that nothing asks for.", ("simplify", "fuse"), in_the_line=True),
    "einsum-copies": Kind("`einsum` permutes and copies its operands.", in_the_line=True),
    "repeat-not-expand": Kind("`repeat` writes what broadcasting reads as it is.", ("fuse",), in_the_line=True),
    # Computed again.
    "computed-again": Kind(
        "The forward computes a value several times from the same operands.", ("simplify",), in_the_line=True
    ),
    "constant-each-step": Kind("Every step computes a table from constants alone.", ("fuse",), in_the_line=True),
    "constant-from-host": Kind(
        "Python makes a tensor of numbers in every step, which is copied to the GPU.", in_the_line=True
    ),
    "checkpoint-not-needed": Kind("Checkpoints compute again what there is memory to keep."),
    "second-backward": Kind("A second backward runs through the same graph."),
    # Matmuls.
    "matmul-chain-order": Kind(
        "A chain of matmuls runs in the order that takes more arithmetic.", in_the_line=True, spares_launches=False
    ),
    "heads-apart": Kind("One input is multiplied by many matrices in matmuls of their own.", in_the_line=True),
    "stack-of-matmuls": Kind("Small matmuls of one shape run one after the other.", in_the_line=True),
    "one-hot-matmul": Kind("A matmul by one-hot rows picks rows.", in_the_line=True),
    "inverse-then-matmul": Kind("An inverse is computed only to be multiplied with.", in_the_line=True),
    # Loops and writes.
    "per-sample-loop": Kind("A loop computes the same for each sample of a batch.", in_the_line=True),
    "loss-in-loop": Kind("A loop computes a loss for each step of a sequence, and adds them up.", in_the_line=True),
    "cat-in-loop": Kind("A loop concatenates what it has made so far, again and again.", in_the_line=True),
    "write-into-view": Kind("Writes into slices make the backward copy whole gradients: CopySlices.", in_the_line=True),
    # Layers.
    "batch-norm-few-samples": Kind("Batch norm takes its statistics from a handful of values."),
    "bias-before-batch-norm": Kind("Batch norm subtracts the bias of the convolution before it.", in_the_line=True),
    "log-of-softmax": Kind(
        "The logarithm of a softmax or a sigmoid is computed in two ops.", ("fuse",), in_the_line=True
    ),
    "find-unused-parameters": Kind("DistributedDataParallel looks for unused parameters in every step."),
    "unused-parameters": Kind("DistributedDataParallel reduces, or waits for, parameters that get no gradient."),
    "frozen-parameters-reduced": Kind("DistributedDataParallel reduces zeros for frozen parameters."),
    # Needless work.
    "cat-of-nothing": Kind("A concatenation appends an empty tensor.", ("simplify", "cat")),
    "cat-in-backward": Kind(
        "The backward concatenates what could be written into one buffer.", ("cat", "fuse"), by_passes_alone=True
    ),
    "cat-in-forward": Kind(
        "The forward concatenates what could be written into one buffer.", ("cat", "fuse"), by_passes_alone=True
    ),
    "unfused-pointwise": Kind(
        "Pointwise ops and reductions run as kernels of their own.", ("fuse",), by_passes_alone=True
    ),
    "unaligned-matmul": Kind(
        "A matmul runs over rows that are no multiple of 16 bytes.", ("pad",), spares_launches=False
    ),
    "never-used": Kind("The forward computes what nothing uses."),
    "saved-not-recomputed": Kind(
        "A saved tensor costs more to keep than to compute again.", ("remat", "fuse"), by_passes_alone=True
    ),
    # Gradients.
    "gradient-without-optimizer": Kind("Every backward computes gradients that no optimizer takes.", ("freeze",)),
    "gradient-of-data": Kind("Every backward computes the gradient of data.", ("freeze",)),
    "gradient-dropped": Kind("The backward computes gradients and drops them."),
    "gradient-unread": Kind("An op of the backward computes a gradient that nothing reads.", ("freeze",)),
    "growing-graph": Kind("A sum or a list over steps keeps the graph of every step.", in_the_line=True),
    "frozen-weight-gradient": Kind("The backward computes the gradient of a frozen parameter.", ("freeze",)),
    # Launches.
    "loop-of-small-kernels": Kind(
        "A loop launches many kernels that are shorter than their launch.", ("fuse", "optimizer_step")
    ),
    # The update.
    "optimizer-not-fused": Kind(
        "An optimizer works tensor by tensor or list by list, and reads and writes each several times.",
        ("optimizer_step", "fuse"),
    ),
    "update-share": Kind(
        "The update takes a large share of the step.", ("optimizer_step",), in_part=True, spares_launches=False
    ),
    # Settings.
    "anomaly-mode": Kind("Autograd's anomaly mode is on."),
    "launch-blocking": Kind("CUDA_LAUNCH_BLOCKING makes the host wait for every kernel."),
    "deterministic-mode": Kind("Deterministic algorithms are required, and some are slow.", spares_launches=False),
    "profiler-on": Kind("A profiler notes every op."),
    "cudnn-off": Kind("cuDNN is switched off in a program with convolutions.", spares_launches=False),
    "cudnn-benchmark-off": Kind("cuDNN guesses the algorithms of convolutions.", spares_launches=False),
    # What only a profile of a run shows.
    "data-loading": Kind("The GPU is idle while the host makes or awaits the next batch.", of_run=True),
    "synchronous-checkpoint": Kind("The GPU is idle while a checkpoint is saved.", of_run=True),
    "synchronous-logging": Kind("The GPU is idle while the host logs.", of_run=True),
    "driver-allocation": Kind("The GPU is idle while the host allocates or frees memory in the driver.", of_run=True),
    "kernel-loading": Kind("The GPU is idle while the host loads kernels.", of_run=True),
    "slow-launch-calls": Kind("The GPU is idle while a launch call takes unusually long.", of_run=True),
    "host-idle": Kind("The GPU is idle while no operator runs on the host.", of_run=True),
    "launch-bound": Kind("The GPU is idle because launches come too late.", of_run=True),
    # What only the profiles of all ranks show.
    "straggler": Kind("One rank comes late to collectives, and the others wait for it.", of_run=True),
    "unbalanced-ranks": Kind("Ranks have different amounts of work in the same modules.", of_run=True),
    "slow-transfer": Kind("Some collectives take longer than others of their size, with all ranks there.", of_run=True),
    "exposed-collective": Kind("A GPU computes nothing while a collective transfers.", of_run=True),
    "small-collectives": Kind("Many collectives are so small that their latency is most of their time.", of_run=True),
    "float32-collectives": Kind("Collectives that nothing hides transfer float32.", of_run=True),
    "host-waits-for-collective": Kind(
        "A barrier, or a value that Python reads, holds the host until a collective is over.", of_run=True
    ),
    "collective-order": Kind(
        "Ranks call different collectives at the same place, which hangs or mixes numbers up.", of_run=True
    ),
    "pageable-copy": Kind("A copy goes through pageable memory, and the host waits for it."),
}
"""By id. A finding with another id is refused."""


def looked_for() -> tuple[str, ...]:
    """What a trace is examined for, as sentences."""
    return tuple(kind.says for kind in KINDS.values() if not kind.of_run)
