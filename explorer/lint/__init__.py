"""What a program's own lines do that they need not: a linter over the captured trace, one file for each family.

This package never imports session, profiling or dynamo, and runs no pass. `tracefuse.diagnose.diagnose` calls its detectors.
"""

from tracefuse.findings.finding import Detector
from tracefuse.lint import again, dtypes, layouts, loops, models, products

LINTS: tuple[Detector, ...] = (
    again.computed_again,
    again.constants_of_each_step,
    again.needless_checkpoints,
    again.second_backwards,
    dtypes.casts_back_and_forth,
    dtypes.casts_done_again,
    dtypes.logits_in_float32,
    dtypes.float64_leaks,
    layouts.needless_copies,
    layouts.einsum_copies,
    layouts.repeats,
    layouts.convolutions_of_nchw,
    loops.loops_over_samples,
    loops.growing_concatenations,
    loops.writes_into_views,
    models.batch_norms_of_few,
    models.biases_before_batch_norm,
    models.losses_by_hand,
    models.searches_for_unused,
    products.chains_in_the_wrong_order,
    products.matmuls_of_one_input,
    products.stacks_of_small_matmuls,
    products.products_with_one_hot,
    products.inverses,
)
"""The detectors of this package."""
