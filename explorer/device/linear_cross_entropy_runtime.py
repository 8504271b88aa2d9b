"""Runs a linear layer with its cross-entropy in chunks of rows; its text below the mark is copied into exported files.

Of a chunk, the logits are computed by ATen's matmul, and one kernel turns them, where they lie, into their gradient: each of
its programs reads a row twice, once for its maximum and the sum of its exponentials (online, in float32, or float64 for
float64), once to write the gradient over it. Two more matmuls make of that what is wanted. So no more logits are alive than
those of a chunk. On a CPU torch's own ops do what the kernel does.

Of a row of C logits x with the target t, scaled by s (the loss's scale, divided by the number of rows that count if it is a
mean), its labels smoothed by e:

    loss     = log(sum(exp(x))) - (1 - e) * x[t] - e / C * sum(x)
    gradient = s * (exp(x - log(sum(exp(x)))) - (1 - e) * (column == t) - e / C)

A soft cap or a scale makes x of the matmul's results, `outer * activation(inner * logit + shift)`; both readings of a row do
it, and the gradient is multiplied by its slope.

A row whose target is `ignore_index` has neither. A target that is no class makes the row's loss and gradient NaN.
Source of the idea: "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al., 2024; Liger-Kernel computes the
gradients in the forward as well.
"""

import torch
import triton
import triton.language as tl

# --- copied into exported files that chunk the loss of a linear layer ---
LOWEST = tl.constexpr(-3.4028234663852886e38)
# More columns at once would not fit into a program's registers.
MOST_COLUMNS = 8192


@torch.no_grad()
def linear_cross_entropy(
    input, weight, bias, target, scale, *, ignore_index, mean, dtype, rows, input_wanted, weight_wanted, bias_wanted,
    smoothing=0.0, activation="", inner=1.0, shift=0.0, outer=1.0
):  # fmt: skip
    """The loss of the logits `outer * activation(inner * (input @ weight.t() + bias) + shift)`, the gradients that are wanted
    of input, weight and bias, and the memory that the chunks and the sums over them took. `weight` is [classes, width]; what
    is not wanted is empty."""
    has_gradient = input_wanted or weight_wanted or bias_wanted
    row_map = (smoothing, activation, inner, shift, outer)
    count, classes, rows = input.shape[0], weight.shape[0], min(rows, input.shape[0])
    padded = -(-classes // 16) * 16  # rows that matmuls and the kernel load 16 bytes at a time
    wide = torch.promote_types(input.dtype, torch.float32)
    is_valid = target != ignore_index
    valid = is_valid.sum(dtype=wide)
    factor = torch.ones((), dtype=wide, device=input.device) if scale is None else scale.to(wide)
    factor = factor / valid if mean else factor
    losses = torch.empty(count, dtype=wide, device=input.device)
    # Products in bfloat16 on a CPU with AMX read what lies between rows; the kernel of a GPU writes it.
    chunk = input.new_empty(rows * padded) if input.is_cuda else input.new_zeros(rows * padded)
    grad_input = input.new_empty(input.shape if input_wanted else [0])
    grad_weight, sums = gradient_of_weight(weight, weight_wanted, -(-count // max(1, rows)))
    grad_bias = torch.zeros(classes if bias_wanted else 0, dtype=wide, device=input.device)
    for start in range(0, count, max(1, rows)):
        end = min(start + rows, count)
        some = input[start:end]
        logits = chunk.view(rows, padded)[: end - start, :classes]
        if bias is None:
            torch.mm(some, weight.t(), out=logits)
        else:
            torch.addmm(bias, some, weight.t(), out=logits)
        softmax_gradient(logits, target[start:end], factor, losses[start:end], ignore_index, has_gradient, row_map)
        if input_wanted:
            torch.mm(logits, weight, out=grad_input[start:end])
        if weight_wanted:
            add_product(grad_weight, sums, logits.t(), some, is_first=start == 0)
        if bias_wanted:
            grad_bias += logits.sum(0, dtype=wide)
    if sums.numel():
        grad_weight.copy_(sums)
    loss = losses.sum()
    loss = loss / valid if mean else loss
    return loss.to(dtype), grad_input, grad_weight, grad_bias.to(input.dtype), chunk, sums


def gradient_of_weight(weight, is_wanted, chunks):
    """Memory for the gradient of the weight, laid out as it is, and for float32 sums where many chunks would be rounded."""
    is_wide = is_wanted and chunks > 8 and weight.dtype in (torch.float16, torch.bfloat16)
    sums = torch.empty(weight.shape if is_wide else [0], dtype=torch.float32, device=weight.device)
    if not is_wanted:
        return weight.new_empty([0]), sums
    has_rows = weight.stride(-1) == 1 or weight.shape[-1] == 1
    made = weight.new_empty(weight.shape) if has_rows else weight.new_empty(weight.t().shape).t()
    return (made.zero_() if chunks == 0 else made), sums


def add_product(total, sums, left, right, is_first):
    """Add a chunk's product to the gradient of the weight."""
    if sums.numel():
        torch.mm(left, right, out=total)
        sums.copy_(total) if is_first else sums.add_(total)
    elif is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def softmax_gradient(logits, target, factor, losses, ignore_index, is_wanted, row_map):
    """Write each row's loss, and over the logits their gradient times `factor`, if that `is_wanted`. `row_map` is what
    smoothes labels and maps logits: (smoothing, activation, inner, shift, outer)."""
    classes = logits.shape[1]
    if not logits.is_cuda:
        return softmax_gradient_by_torch(logits, target, factor, losses, ignore_index, is_wanted, row_map)
    block = min(MOST_COLUMNS, triton.next_power_of_2(classes))
    warps = max(4, min(16, block // 512))
    with torch.cuda.device(logits.device):
        softmax_gradient_kernel[(logits.shape[0],)](
            logits, target, factor, losses, logits.stride(0), classes, ignore_index, target.stride(0),
            is_wanted, block, *row_map, num_warps=warps,
        )  # fmt: skip


def softmax_gradient_by_torch(logits, target, factor, losses, ignore_index, is_wanted, row_map):
    """What the kernel does, with torch's own ops; it raises where a target is no class."""
    smoothing, activation, inner, shift, outer = row_map
    wide, slope = mapped_by_torch(logits.to(losses.dtype), activation, inner, shift, outer)
    is_valid = target != ignore_index
    column = torch.where(is_valid, target, 0)[:, None]
    lse = wide.logsumexp(1, keepdim=True)
    lse = lse.masked_fill_(lse == float("inf"), float("nan"))  # a row with +inf has no probabilities
    row_losses = lse - (1 - smoothing) * wide.gather(1, column)
    if smoothing:
        row_losses -= smoothing * wide.mean(1, keepdim=True)
    losses.copy_(torch.where(is_valid, row_losses[:, 0], 0))
    if is_wanted:
        gradient = (wide - lse).exp_().scatter_add_(1, column, torch.full_like(lse, smoothing - 1))
        gradient = gradient.sub_(smoothing / logits.shape[1]) if smoothing else gradient
        gradient = gradient if slope is None else gradient.mul_(slope)
        logits.copy_(torch.where(is_valid[:, None], gradient.mul_(factor * inner * outer), 0))


def mapped_by_torch(x, activation, inner, shift, outer):
    """`mapped` with torch's own ops; the slope is None where it is 1."""
    x = x if (inner, shift) == (1.0, 0.0) else x * inner + shift
    if activation == "tanh":
        x = x.tanh()
        return x * outer, 1 - x * x
    if activation == "sigmoid":
        x = x.sigmoid()
        return x * outer, x * (1 - x)
    return x, None


@triton.jit
def mapped(x, ACTIVATION: tl.constexpr, INNER: tl.constexpr, SHIFT: tl.constexpr, OUTER: tl.constexpr):
    """What a soft cap or a scale makes of logits, and its slope without the factors."""
    slope = 1.0
    if INNER != 1.0 or SHIFT != 0.0:
        x = x * INNER + SHIFT
    if ACTIVATION == "tanh":
        near: tl.constexpr = 0.001 if x.dtype == tl.float64 else 0.3
        square = x * x  # Near 0, where the quotient cancels, the Taylor series to x**9.
        series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * 62.0 / 2835)))
        x = tl.where(tl.abs(x) < near, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
        slope = 1.0 - x * x
    if ACTIVATION == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
        slope = x * (1.0 - x)
    return x * OUTER, slope


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, target_ptr, factor_ptr, loss_ptr, row_stride, classes, ignore_index, target_stride,
    IS_WANTED: tl.constexpr, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, ACTIVATION: tl.constexpr,
    INNER: tl.constexpr, SHIFT: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """One program a row: reads it twice, and writes its gradient over it. What lies between two rows is read and overwritten
    too: the mask is that of whole vectors, so that rows of any number of classes are loaded in such."""
    wide: tl.constexpr = tl.float64 if logits_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride)
    is_valid = target != ignore_index
    row_ptr = logits_ptr + row * row_stride
    columns = tl.arange(0, BLOCK)
    is_class = (target >= 0) & (target < classes)
    # Read before anything is written: the sums below wait for all threads of the program.
    picked = tl.load(row_ptr + target, mask=is_class, other=float("nan")).to(wide)
    picked = mapped(picked, ACTIVATION, INNER, SHIFT, OUTER)[0]
    largest = tl.full([BLOCK], LOWEST, wide)
    total = tl.zeros([BLOCK], wide)
    plain_sum = tl.zeros([BLOCK], wide)
    for start in range(0, classes, BLOCK):
        x = tl.load(row_ptr + start + columns, mask=start + columns < row_stride, other=float("-inf")).to(wide)
        x = mapped(x, ACTIVATION, INNER, SHIFT, OUTER)[0]
        if SMOOTHING != 0.0:
            plain_sum += tl.where(start + columns < classes, x, 0.0)
        x = tl.where(start + columns < classes, x, float("-inf"))
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    most = tl.max(largest, axis=0)
    lse = most + tl.log(tl.sum(total * tl.exp(largest - most), axis=0))
    loss = lse - (1.0 - SMOOTHING) * picked
    if SMOOTHING != 0.0:
        loss -= SMOOTHING * tl.sum(plain_sum, axis=0) / classes
    tl.store(loss_ptr + row, tl.where(is_valid, loss, 0.0))
    if IS_WANTED:
        factor = tl.load(factor_ptr).to(wide)
        factor = tl.where(is_class, factor, float("nan"))
        one = tl.full([], 1.0, wide)  # Numbers alone are float32.
        for start in range(0, classes, BLOCK):
            at = start + columns
            x = tl.load(row_ptr + at, mask=at < row_stride, other=float("-inf")).to(wide)
            x, slope = mapped(x, ACTIVATION, INNER, SHIFT, OUTER)
            x = tl.where(at < classes, x, float("-inf"))
            gradient = tl.exp(x - lse) - tl.where(at == target, one - SMOOTHING, 0.0)
            if SMOOTHING != 0.0:
                gradient -= one * SMOOTHING / classes
            gradient = gradient * factor * slope * (INNER * OUTER)
            gradient = tl.where(is_valid, gradient, 0.0)
            tl.store(row_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < row_stride)
