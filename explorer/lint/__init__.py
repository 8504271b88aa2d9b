"""What a program's own lines do that they need not: a linter over the captured trace, one file for each family.

This package never imports session, profiling or dynamo, and runs no pass. `tracefuse.diagnose.diagnose` calls its detectors.
"""

from tracefuse.findings.finding import Detector
from tracefuse.lint import again, dtypes, layouts, loops, losses, models, products

LINTS: dict[Detector, tuple[str, ...]] = {
    again.computed_again: ("computed-again",),
    again.constants_of_each_step: ("constant-each-step",),
    again.needless_checkpoints: ("checkpoint-not-needed",),
    again.second_backwards: ("second-backward",),
    dtypes.casts_back_and_forth: ("cast-round-trip", "norm-in-float32", "dropout-in-float32"),
    dtypes.casts_done_again: ("cast-again",),
    dtypes.logits_in_float32: ("logits-in-float32",),
    dtypes.float64_leaks: ("float64-leak",),
    layouts.needless_copies: ("needless-copy",),
    layouts.einsum_copies: ("einsum-copies",),
    layouts.repeats: ("repeat-not-expand",),
    layouts.convolutions_of_nchw: ("not-channels-last",),
    loops.loops_over_samples: ("per-sample-loop",),
    losses.losses_of_steps: ("loss-in-loop",),
    loops.growing_concatenations: ("cat-in-loop",),
    loops.writes_into_views: ("write-into-view",),
    models.batch_norms_of_few: ("batch-norm-few-samples",),
    models.biases_before_batch_norm: ("bias-before-batch-norm",),
    models.losses_by_hand: ("log-of-softmax",),
    models.searches_for_unused: ("find-unused-parameters",),
    products.chains_in_the_wrong_order: ("matmul-chain-order",),
    products.matmuls_of_one_input: ("heads-apart",),
    products.stacks_of_small_matmuls: ("stack-of-matmuls",),
    products.products_with_one_hot: ("one-hot-matmul",),
    products.inverses: ("inverse-then-matmul",),
}
"""The detectors of this package, and the ids of what each may find."""
