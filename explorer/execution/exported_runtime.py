"""What every exported file has behind its program; its text below the mark is copied, never imported,
with that of `tracefuse.device.near_runtime` above it.

The names in capitals, `forward`, `backward` and their captured twins are defined above it in an exported file.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._neg_view`.
"""

# ruff: noqa: F821
import math
import statistics
import sys
import time

import torch

# --- copied into every exported file ---
# The optimised program rounds elsewhere: it may be off by so many times what rounding the inputs changes the captured one by.
ROUNDINGS = 4


def expect(tensor, name, shape, stride, dtype=None):
    """`tensor` with the strides that the kernels were generated for; raises ValueError for another shape or dtype."""
    if tensor.is_neg() or tensor.is_conj():  # kernels read memory as it is
        tensor = tensor.resolve_conj().resolve_neg()
    is_shape_right, is_dtype_right = tensor.shape == shape, dtype is None or tensor.dtype is dtype
    if is_shape_right and is_dtype_right and tensor.stride() == stride:
        return tensor
    if not (is_shape_right and is_dtype_right):
        given = f"{tensor.dtype}{list(tensor.shape)}"
        captured = f"{dtype or tensor.dtype}{list(shape)}"
        raise ValueError(f"{name} is {given}, and the program was captured with {captured}: capture it again")
    if tensor.numel() <= 1:
        return tensor
    if memory_size(shape, stride) < tensor.numel():
        return laid_over(tensor, name, shape, stride)
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def expect_sizes(value, shapes, name):
    """Raise ValueError where a value whose size depends on the data has another one than `shapes` say."""
    for tensor, shape in zip(value if isinstance(value, (tuple, list)) else (value,), shapes, strict=True):
        if tensor.shape != shape:
            raise ValueError(
                f"the size of {name} depends on the data: it is {list(tensor.shape)}, and was {list(shape)} when the program "
                "was captured: capture it again with this data, or without the passes if it is the same (fused, numbers round "
                "elsewhere)"
            )


def memory_size(shape, stride):
    """How many elements of memory a tensor spans: fewer than it has itself if it is expanded."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def laid_over(tensor, name, shape, stride):
    """`tensor` in memory whose elements are shared (an expanded tensor); raises ValueError where they differ."""
    size = memory_size(shape, stride)
    places = torch.arange(size, device=tensor.device).as_strided(shape, stride)
    memory = tensor.new_empty(size)
    memory[places.flatten()] = tensor.flatten()
    shared = memory.as_strided(shape, stride)
    if torch.isclose(shared, tensor, rtol=0, atol=0, equal_nan=True).all():
        return shared
    raise ValueError(
        f"{name} was captured as an expanded tensor with strides {stride}, and the given one differs along an expanded "
        "dimension: pass one that is expanded too, or capture again with `.contiguous()`"
    )


def set_aside(tensors, written):
    """`tensors` for the backward, those that lie in the memory of an input about to be overwritten as copies."""
    memory = {t.untyped_storage().data_ptr() for t in written}
    return [copy_strided(t) if t.untyped_storage().data_ptr() in memory else t for t in tensors]


def copy_strided(tensor):
    """A copy with the very strides, in memory of its own, however the elements overlap."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
    copy = copy.conj() if tensor.is_conj() else copy
    return torch._neg_view(copy) if tensor.is_neg() else copy


def versions(tensors):
    """How often each was written in place, by autograd's count; those of `torch.inference_mode` have none."""
    return [0 if t is None or t.is_inference() else t._version for t in tensors]


# Positions among the inputs of those that are overwritten.
OVERWRITTEN = [position for position, row in enumerate(INPUTS) if row[0] in MUTATED]
# Without a result to differentiate, what is computed from gradients is computed at once: `run` returns it behind RESULTS.
AT_ONCE = bool(LATE) and not ROOTS
# Positions among what `run` returns of those without a cotangent.
WITHOUT_GRADIENT = [i for i in range(len(RESULTS) + AT_ONCE * len(LATE)) if i not in ROOTS]
# The LATE of the latest backward, by name.
late_results = {}


class Step(torch.autograd.Function):
    """The program as one differentiable operation: takes INPUTS, returns the tuple of RESULTS."""

    @staticmethod
    def forward(ctx, *inputs):
        laid_out = [
            expect(t, n, shape, stride, dtype) for t, (n, _, shape, stride, dtype) in zip(inputs, INPUTS, strict=True)
        ]
        outputs = forward(*laid_out)
        results, kept = outputs[: len(RESULTS)], outputs[len(RESULTS) + len(MUTATED) :]
        read_again = [laid_out[i] for i in READ_AGAIN]
        if AT_ONCE:
            results, kept, read_again = (*results, *backward([*kept, *read_again])), (), []
        if OVERWRITTEN:
            written = [inputs[i] for i in OVERWRITTEN]
            kept, read_again = set_aside(kept, written), set_aside(read_again, written)
            for position, tensor in zip(OVERWRITTEN, written, strict=True):
                tensor.copy_(outputs[MUTATED[INPUTS[position][0]]])
        # Results and inputs go through autograd, which breaks the cycles that they would make; the rest is freed early. A
        # view of a result would hold the result, and so this step.
        own = {id(t) for t in results}
        ctx.save_for_backward(*(t for t in kept if id(t) in own), *read_again)
        ctx.kept = [None if id(t) in own else t.detach() if id(t._base) in own else t for t in kept]
        ctx.watched = [results[i].detach() for i in WATCHED]
        ctx.versions = versions([*ctx.kept, *ctx.watched])
        if WITHOUT_GRADIENT:
            ctx.mark_non_differentiable(*(results[i] for i in WITHOUT_GRADIENT))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the generated backward has no derivative: capture a program that takes both, or leave out "
                "create_graph=True"
            )
        if ctx.kept is None:
            raise RuntimeError("backward has run and freed what it needs: call `run` again")
        saved = iter(ctx.saved_tensors)
        if versions([*ctx.kept, *ctx.watched]) != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "result in memory that the backward reads; write after the backward, or to a copy"
            )
        boxed = [next(saved) if t is None else t for t in ctx.kept]
        ctx.kept = ctx.watched = None
        boxed += saved
        boxed += [expect(cotangents[i], RESULTS[i], *layout) for i, layout in zip(ROOTS, COTANGENTS, strict=True)]
        return by_input(backward(boxed))


def by_input(found):
    """What `backward` returned as a gradient or None for each of INPUTS; its LATE go to `late_results`."""
    late_results.update(zip(LATE, found, strict=False))
    gradients = [None] * len(INPUTS)
    for position, gradient in zip(GRADIENTS, found[len(LATE) :], strict=True):
        gradients[position] = gradient
    return tuple(gradients)


def run(*inputs):
    """RESULTS of INPUTS (the tensor itself if there is one), differentiable in the inputs named by GRADIENTS.

    LATE are computed with the gradients, and are in `late_results` then; without a result to differentiate they are returned.
    """
    if len(inputs) != len(INPUTS):
        raise ValueError(f"run takes {len(INPUTS)} inputs, got {len(inputs)}: {[row[0] for row in INPUTS]}")
    results = Step.apply(*inputs)
    return results[0] if len(results) == 1 else results


def example_inputs(device=DEVICE, seed=0, rounded=False):
    """Random tensors of the captured shapes and strides: floats within the captured range, integers that were captured, in
    order where they were.

    With `rounded` each float is up or down by one rounding, none of which counts as finer than that of ROUNDS_AS.
    """
    generator = torch.Generator(device).manual_seed(seed)
    signs = torch.Generator(device).manual_seed(seed)
    made = []
    for at, ((_, _, shape, stride, dtype), drawn) in enumerate(zip(INPUTS, DRAWN, strict=True)):
        memory = torch.empty(memory_size(shape, stride), dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            mean, deviation, least, greatest = drawn
            parts = torch.view_as_real(memory) if dtype.is_complex else memory
            parts.normal_(mean, deviation, generator=generator).clamp_(least, greatest)
            if rounded:
                eps = max(torch.finfo(of).eps for of in (dtype, ROUNDS_AS))
                parts *= 1 + eps * torch.empty_like(parts).uniform_(-1, 1, generator=signs).sign()
                if least < greatest:  # a probability stays one
                    parts.clamp_(least, greatest)
        elif memory.numel() > 0:
            how, values = drawn
            known = torch.tensor(values, dtype=dtype, device=device)
            places = torch.randint(len(values), memory.shape, generator=generator, device=device)
            if how == "captured":
                places = torch.arange(memory.numel(), device=device) % len(values)
            elif how == "ordered":
                places = places.sort().values
                places[0] = 0
            if how == "permuted":
                known = known + torch.randperm(memory.numel(), generator=generator, device=device).to(dtype)
                places = torch.arange(memory.numel(), device=device)
            memory = known[places]
        memory = memory.cpu() if at in ON_CPU else memory
        made.append(memory.as_strided(shape, stride))
    return made


def example_cotangents(dtypes, device=DEVICE, seed=1):
    """Cotangents of the captured shapes and strides: the captured number, or random ones where they were not all one."""
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for (shape, stride), number, dtype in zip(COTANGENTS, SEEDS, dtypes, strict=True):
        memory = torch.empty(memory_size(shape, stride), dtype=dtype, device=device)
        memory = memory.normal_(generator=generator) if number is None else memory.fill_(number)
        made.append(memory.as_strided(shape, stride))
    return made


def replay(forward, backward, inputs, read_again, mutated, seed=0, waits=True):
    """(results, new values of overwritten inputs, LATE and gradients, seconds) of one run, random ops drawing from `seed`. It
    waits for the GPU where it `waits`."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    outputs = forward(*inputs)
    results, kept = outputs[: len(RESULTS)], outputs[len(RESULTS) + len(mutated) :]
    written = {name: outputs[position] for name, position in mutated.items()}
    cotangents = example_cotangents([results[i].dtype for i in ROOTS])
    del outputs
    boxed = [*kept, *(inputs[i] for i in read_again), *cotangents]
    del kept
    found = backward(boxed)
    if waits and DEVICE == "cuda":
        torch.cuda.synchronize()
    return results, written, found, time.perf_counter() - start


def programs():
    return {
        "captured": (captured_forward, captured_backward, CAPTURED_READ_AGAIN, CAPTURED_MUTATED),
        "optimised": (forward, backward, READ_AGAIN, MUTATED),
    }


def outputs(name, inputs):
    """All that one of `programs` computes, by what it is."""
    front, back, read_again, mutated = programs()[name]
    results, written, behind, _ = replay(front, back, inputs, read_again, mutated)
    grads_of = CAPTURED_GRADIENTS if name == "captured" else GRADIENTS
    found = dict(zip(RESULTS, results, strict=True)) | dict(zip(LATE, behind, strict=False))
    found |= {f"new value of {of}": tensor for of, tensor in written.items()}
    return found | {f"gradient of {INPUTS[i][1]}": g for i, g in zip(grads_of, behind[len(LATE) :], strict=True)}


LISTED = 10
DRAWS = 3
# So many times of what is allowed are one step of a function; what is further off, or no number, is none.
MOST_BY_CHANCE = 100


@torch.no_grad()
def check():
    """Print how far what is computed is from what the captured program computes; returns whether all of it is near.

    Near is within a tolerance of the dtype, or within what the captured program itself changes by if its inputs are rounded.
    Where a value is not near, more random inputs are drawn, DRAWS in all, and it counts where it is not for most of them, or
    far beyond what is allowed for one: beside the step of a function, as of relu, a rounding may be on the other side of it
    for some. A line stands for each value that is not near, and for the LISTED that come closest to what is allowed.
    """
    found = compared(0)
    draws = [found]
    if not all(is_good for is_good, _, _ in found.values()):
        draws += [compared(seed) for seed in range(1, DRAWS)]
    far = {
        label
        for label in found
        if 2 * sum(not one[label][0] for one in draws) > len(draws)
        or any(not one[label][0] and not one[label][1] <= MOST_BY_CHANCE for one in draws)
    }
    near = sorted(((one[1], label) for label, one in found.items() if label not in far), reverse=True)
    for label in found:
        if label in far:
            print(f"BAD  {found[label][2]}")
    for _, label in near[:LISTED]:
        print(f"ok   {found[label][2]}{'' if found[label][0] else '; most random inputs agree'}")
    print(f"{len(near)} of {len(found)} values are near what the captured program computes")
    return not far


def compared(seed):
    """Of each value, for random inputs: whether it is near, its difference over what is allowed, and a line that says so."""
    captured, optimised = (outputs(name, example_inputs(seed=seed)) for name in programs())
    rounded = outputs("captured", example_inputs(seed=seed, rounded=True))
    by_rounding = {label: distances(rounded[label], reference)[0] for label, reference in captured.items()}
    # One rounding may happen to leave an output as it is, so that none is taken for less sensitive than most.
    usual = statistics.median([d for d in by_rounding.values() if math.isfinite(d)] or [0.0])
    gradients = [tensor for label, tensor in captured.items() if label.startswith("gradient of")]
    largest = max((magnitude(tensor) for tensor in gradients), default=0.0)
    found = {}
    for label, ours in optimised.items():
        reference = captured[label]
        relative, greatest = distances(ours, reference)
        of_dtype = max(TOLERANCE.get(dtype, 0.0) for dtype in (ours.dtype, COARSEST))
        rounding = max(usual, by_rounding[label] if math.isfinite(by_rounding[label]) else 0.0)
        tolerance = max(of_dtype, ROUNDINGS * rounding)
        # A gradient that is zero but for rounding, as of a bias before a batch norm, differs by as much as it is.
        share = max(NOISE.get(dtype, 0.0) for dtype in (ours.dtype, COARSEST))
        noise = share * largest if label.startswith("gradient of") else 0.0
        good = is_near(relative, greatest, magnitude(reference), tolerance, noise)
        why = f": rounded inputs change it by {rounding:.0e}" if tolerance > of_dtype else ""
        line = f"{label:60s} relative difference {relative:.1e}, allowed {tolerance:.0e}{why}"
        found[label] = good, relative / (tolerance or 1.0), line
    return found


TIMED = "forward + backward"


def timed_programs():
    """Of both programs a function that runs what is TIMED once and returns the seconds that it took."""
    inputs = example_inputs()

    def timed(front, back, read_again, mutated):
        return lambda: replay(front, back, inputs, read_again, mutated)[-1]

    return {name: timed(*parts) for name, parts in programs().items()}


@torch.no_grad()
def benchmark(rounds=20):
    """Print the median time of what is TIMED of both programs, run in turn."""
    programs = timed_programs()
    times = {name: [] for name in programs}
    for turn in range(rounds + 3):
        for name, run in programs.items():
            seconds = run()
            if turn >= 3:
                times[name].append(seconds * 1e3)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    for name, found in times.items():
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{name:10s} {statistics.median(found):9.3f} ms {TIMED} ({spread}), measured on {where}")


def main():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit("this program was captured on a GPU: run it on a machine with CUDA")
    if HAS_KERNELS and DEVICE == "cpu":
        print("On a CPU the kernels' ATen references run: the Triton kernels themselves are neither checked nor timed.")
    if SIZED_BY_DATA:
        sys.exit(
            f"not checked: the size of {', '.join(SIZED_BY_DATA)} depends on the data, and random inputs give another"
        )
    passed = check()
    benchmark()
    sys.exit(0 if passed else "results or gradients differ from the captured program: do not use this file")


if __name__ == "__main__":
    main()
