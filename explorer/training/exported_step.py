"""What the exported file of a whole step has beside `tracefuse.execution.exported_runtime`; its text below the mark is copied.

The names in capitals, `forward`, `backward`, `update` and their captured twins are defined above it in an exported file. No
line here knows one optimizer from another: which numbers may change from step to step is said in
`tracefuse.training.host_numbers`, and which steps are refused in `tracefuse.training.refusals`.
"""

# ruff: noqa: F821
import contextlib
import operator
import warnings
import weakref

import torch


# --- copied into every exported file of a whole step ---
def whole_step(inputs, operands, cotangents):
    """What STEP_RESULTS names, of INPUTS and those UPDATED that are not HANDED; parameters, buffers and state are written."""
    outputs = forward(*inputs)
    results, kept = outputs[: len(RESULTS)], outputs[len(RESULTS) + len(MUTATED) :]
    written = [(inputs[i], outputs[MUTATED[INPUTS[i][0]]]) for i in OVERWRITTEN]
    boxed = [*kept, *(inputs[i] for i in READ_AGAIN), *cotangents]
    del outputs, kept
    found = backward(boxed)
    operands = list(operands)
    for place, at in GIVEN.items():
        operands[place] = inputs[at]
    for place in WANTED_OLD:
        operands[place] = operands[place].clone()
    for tensor, new in written:
        tensor.copy_(new)
    del written
    made = {"results": results, "found": found}
    for place, (kind, at) in HANDED.items():
        operands[place] = made[kind][at]
    for place in LENT:
        operands[place] = operands[place].clone()
    made["updated"] = update(*operands)
    return tuple([made[kind][at] for kind, at in STEP_RESULTS.values()])


class TrainingStep:
    """A training step on tensors that `bound` finds: `step(*data)` returns STEP_RESULTS (the tensor itself if there is one).

    Data goes by position or by name, all of it: `step.inputs` has the names in order. A call without any takes the `defaults`,
    where there are some, and any call those that are `nameless`, both of which `bound.tell_held` is told. `bound.tensors()`
    gives all others by name and `bound.groups()` the optimizers' `param_groups`, anew where `is_current()` says no.
    """

    def __init__(self, bound, cotangents, defaults=(), nameless=()):
        self.bound, self.cotangents = bound, list(cotangents)
        self.inputs, self.results = tuple(INPUTS[i][0] for i in DATA), tuple(STEP_RESULTS)
        self.defaults, self.nameless = dict(defaults), set(nameless)
        self.trains, self.rates_before, self.is_told = {}, None, not SCHEDULED
        self.bind()
        self.rates_at_first = self.rates_now()

    def __repr__(self):
        return f"<{type(self).__name__}({', '.join(self.inputs)}) -> {', '.join(self.results)}>"

    def bind(self):
        """Find the tensors of the model and of the optimizer; ValueError where one has another shape than captured."""
        self.groups = self.bound.groups()
        self.follow_options()
        tensors = self.bound.tensors()
        self.rates = [(tensors[name], self.groups[optimizer][at]) for name, (optimizer, at) in RATES.items()]
        self.find_counts(tensors)
        self.find_parameters(tensors)
        rows = [row for i, row in enumerate(INPUTS) if i not in DATA]
        given = {*HANDED, *GIVEN}
        own = [(name, source, *row) for i, (name, source, _, *row) in enumerate(UPDATED) if i not in given]
        lies_on = {name: device for name, (device, _) in UPDATE_DRAWN.items()}
        lies_on |= {row[0]: "cpu" if i in ON_CPU else DEVICE for i, row in enumerate(INPUTS)}
        for name, source, shape, stride, dtype in (*rows, *own):
            fits(tensors[name], source, shape, stride, dtype, lies_on[name])
        self.tensors = [None if i in DATA else tensors[row[0]] for i, row in enumerate(INPUTS)]
        self.operands = [None if i in given else tensors[row[0]] for i, row in enumerate(UPDATED)]
        self.held = list({id(t): t for t in (*self.tensors, *self.operands) if t is not None}.values())
        self.places = addresses(self.held)

    def find_counts(self, tensors):
        """Find the counts of steps that are raised here, and what is made of them."""
        self.counts = {}
        for name, (_, optimizer, at) in COUNTS.items():
            self.counts.setdefault((optimizer, at), []).append(tensors[name])
        self.numbers = [
            (tensors[name], self.groups[optimizer][at], formula, (optimizer, at))
            for name, (optimizer, at, formula) in NUMBERS.items()
        ]

    def next_counts(self):
        """The counts that this call raises to, by optimizer and group; ValueError where a group has several."""
        found = {}
        for (optimizer, at), counts in self.counts.items():
            if len(different := sorted({float(count) for count in counts})) > 1:
                raise ValueError(
                    f"parameters of {OPTIMIZERS[optimizer][0]}.param_groups[{at}] have made {different[0]:g} and "
                    f"{different[-1]:g} steps, and had made the same when the step was captured: capture it again"
                )
            found[optimizer, at] = different[0] + 1
        return found

    def find_parameters(self, tensors):
        """Find the parameters that an optimizer has or whose gradients the update reads, and whether each is trained: as
        captured, else as it is when it is found first. Of others, such as a critic's or a teacher's, it changes nothing."""
        kinds, called = KINDS | {name: kind for name, _, kind, *_ in UPDATED}, sources()
        owned = {id(one) for groups in self.groups for group in groups for one in group["params"]}
        read = {source for _, source, kind, *_ in UPDATED if kind == "gradient"}
        watched = [name for name, kind in kinds.items() if kind == "parameter" and name not in FROZEN]
        there = {name: tensors[name] for name in watched if name in tensors}
        self.parameters = {name: one for name, one in there.items() if id(one) in owned or called[name] in read}
        for name, one in self.parameters.items():
            is_trained = name not in MAY_BE_FROZEN and isinstance(one, torch.nn.Parameter)
            self.trains.setdefault(name, is_trained or one.requires_grad)
        self.flags = [self.trains[name] for name in self.parameters]

    def follow_freezing(self):
        """ValueError where a parameter is frozen now that was not, or the other way round: each call updates the same ones."""
        now = [one.requires_grad for one in self.parameters.values()]
        if now != self.flags:
            at = next(at for at, (flag, other) in enumerate(zip(now, self.flags, strict=True)) if flag != other)
            source = sources()[list(self.parameters)[at]]
            stays = "leaves it as it is" if now[at] else "trains it all the same"
            raise ValueError(
                f"{source} has requires_grad={now[at]}, and had {self.flags[at]} before: a compiled step {stays}. Set it back "
                f"(`requires_grad_({self.flags[at]})`), or capture the step again"
            )

    def is_bound(self):
        """Whether all tensors are still where they were found: loading a checkpoint makes new ones."""
        return self.bound.is_current() and addresses(self.held) == self.places

    def follow_options(self):
        """ValueError where an option of the optimizer, which the program computes with, is not what it was."""
        for groups, (name, captured, remedy) in zip(self.groups, OPTIMIZERS, strict=True):
            if len(groups) != len(captured):
                raise ValueError(
                    f"{name} has {len(groups)} parameter groups, and the step was captured with {len(captured)}: "
                    "capture it again"
                )
            for at, (group, options) in enumerate(zip(groups, captured, strict=True)):
                if other := [key for key in options if key not in group]:
                    raise ValueError(
                        f"{name} has no {other[0]}, with which the step was captured: pass an optimizer of the captured kind"
                    )
                for key, value in options.items():
                    if group[key] != value:
                        todo = "" if key == "lr" else "set it back, and keep it so, or "
                        todo = f"for a rate that changes {remedy}, and " if key == "lr" and remedy else todo
                        raise ValueError(
                            f"{name}.param_groups[{at}][{key!r}] is {group[key]!r}, and the step was captured with {value!r}: "
                            f"{todo}capture it again"
                        )

    def follow_rates(self):
        """Write the learning rates that the optimizers have now, and what is computed of them and of counts, where the program
        reads them; ValueError where groups that had one tensor as their rate have different ones now."""
        for name, places in SHARED_RATES.items():
            rates = [self.groups[optimizer][at]["lr"] for optimizer, at in places]
            if any(rate is not rates[0] for rate in rates):
                dtype = next(row[-1] for row in (*UPDATED, *INPUTS) if row[0] == name)
                if len({torch.tensor(float(rate), dtype=dtype).item() for rate in rates}) > 1:
                    groups = " and ".join(f"{OPTIMIZERS[of][0]}.param_groups[{at}]" for of, at in places)
                    raise ValueError(
                        f"{groups} had one tensor as their lr when the step was captured, and have "
                        f"{', '.join(f'{float(rate):g}' for rate in rates)} now: give them the same, or make the optimizer "
                        "with a tensor for each and capture the step again"
                    )
        for tensor, group in self.rates:
            rate = group["lr"]
            if rate is not tensor:
                tensor.copy_(rate) if isinstance(rate, torch.Tensor) else tensor.fill_(rate)
        counts = self.next_counts()
        for tensor, group, formula, of in self.numbers:
            tensor.fill_(formula(group, counts.get(of)))

    def rates_now(self):
        """The learning rates that changed when the step was captured, and what tells whether they were written to since: of a
        number nothing does but the object, of which a schedule makes another one for the same value."""
        rates = [self.groups[optimizer][at]["lr"] for optimizer, at in SCHEDULED]
        return [(rate, rate._version if isinstance(rate, torch.Tensor) else None) for rate in rates]

    def tell_schedules(self):
        """Warn, at the second call, of learning rates that changed from step to step when this was captured, and that nobody
        has changed since the step was made."""
        now = self.rates_now()
        before, self.rates_before = self.rates_before, now
        if before is None:
            return
        self.is_told = True
        rates = zip(SCHEDULED, now, before, self.rates_at_first, strict=True)
        same = [
            place
            for place, (one, version), *others in rates
            if all(one is other and version == old for other, old in others)
        ]
        stay = [f"{OPTIMIZERS[optimizer][0]}.param_groups[{at}]" for optimizer, at in same]
        if stay:
            line = f", or do what {SCHEDULED_IN} does," if SCHEDULED_IN else ""
            tell(
                f"the lr of {' and '.join(stay)} changed from step to step when this one was captured, and is now what it was "
                "in the call before: a compiled step reads it, and leaves schedules and the optimizer's hooks to the program. "
                f"Call `scheduler.step()`{line} behind each call"
            )

    def given(self, data, named):
        """The data in the captured layouts; ValueError for more, for other names, for what is passed twice, and for
        other shapes or dtypes."""
        unknown = sorted(set(named) - set(self.inputs))
        if len(data) > len(self.inputs) or unknown:
            own = f" It draws by itself in {OWN_DRAWS[0]}: let a `DataLoader` yield what you pass." if OWN_DRAWS else ""
            if looked := [name for name in unknown if name in LOOKED_AT]:
                own += (
                    f" The captured one only read a value of {looked[0]}, in {LOOKED_AT[looked[0]]}, by which it left out "
                    "what others may compute: capture a step that computes with it, such as one of a batch with padding."
                )
            takes = ", ".join(self.inputs) or "no data"
            given = f"and nothing called {', '.join(unknown)}" if unknown else f"got {len(data)} by position"
            raise ValueError(f"the step takes {takes}, {given}: pass no more.{own}")
        if twice := [name for name in self.inputs[: len(data)] if name in named]:
            raise ValueError(f"{', '.join(twice)} by position and by name: pass it once")
        passed = dict(zip(self.inputs, data, strict=False)) | named
        if len(passed) < len(self.inputs) and any(name in CARRIED for name in self.inputs[: len(data)]):
            raise ValueError(
                f"the step takes {', '.join(self.inputs)}, of which each step makes {', '.join(CARRIED)} for the next one, "
                f"and got {len(data)} by position: pass that too, as the step before returned it (`c.returned = loss, "
                f"{CARRIED[0]}` in the loop that is captured), or pass what you pass by name"
            )
        found = self.defaults | passed
        held = self.nameless if passed else self.defaults
        if missing := [name for name in self.inputs if name not in passed and name not in held]:
            made = ", ".join(name for name in missing if name in CARRIED)
            before = (
                f". Of {made} each step makes the next: return it from the step (`c.returned = loss, {made}` in the loop that "
                "is captured, behind the line that makes the next one), and pass what the call before returned"
                if made
                else ""
            )
            raise ValueError(f"the step takes {', '.join(self.inputs)}: pass {', '.join(missing)} too{before}")
        for i, device in zip(DATA, DATA_DEVICES, strict=True):
            name, _, shape, _, dtype = INPUTS[i]
            wanted, tensor = f"{dtype}{list(shape)} on {device}", found[name]
            given = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                given = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device.type}"
            if given != wanted:
                place = f", as it is read in {READ_IN[name]}" if name in READ_IN else ""
                raise ValueError(
                    f"{name} is {given}, and the step takes {wanted}{place}: pass that, or capture a step with such data"
                )
        if len(passed) < len(self.inputs):
            self.bound.tell_held(self.inputs, [name for name in self.inputs if name not in passed])
        return [expect(found[INPUTS[i][0]], INPUTS[i][0], *INPUTS[i][2:]) for i in DATA]

    def __call__(self, *data, **named):
        given = self.given(data, named)
        if not self.is_bound():
            self.bind()
        self.follow_options()
        self.follow_freezing()
        if not self.is_told:
            self.tell_schedules()
        with torch.no_grad(), torch.autocast(DEVICE, enabled=False):
            self.follow_rates()
            results = self.run(given)
            for counts in self.counts.values():
                torch._foreach_add_(counts, 1)
        return results[0] if len(results) == 1 else results

    def run(self, given):
        inputs = list(self.tensors)
        for position, tensor in zip(DATA, given, strict=True):
            inputs[position] = tensor
        return whole_step(inputs, self.operands, self.cotangents)


def tell(said, stacklevel=4):
    """Warn the line that called the step, which is so many calls up."""
    with contextlib.suppress(Warning):  # the error that a filter makes of it would end the program
        warnings.warn(said, stacklevel=stacklevel)


class Modes:
    """Modules, by path and as what finds each, and the options that they had when the step was captured."""

    def __init__(self, rows):
        self.rows = [row for row in rows if row[1]() is not None]
        self.known = [(find, operator.attrgetter(*options)) for _, find, options in self.rows]
        values = [tuple(options.values()) for *_, options in self.rows]
        self.before = [one if len(one) > 1 else one[0] for one in values]

    def tell(self, stacklevel):
        """Warn, once of each option, where a module would not run any more as it did when the step was captured."""
        if [None if (one := find()) is None else get(one) for find, get in self.known] == self.before:
            return
        there = [(path, one, options) for path, find, options in self.rows if (one := find()) is not None]
        changed = [(key, *row) for row in there for key, value in row[2].items() if getattr(row[1], key) != value]
        first = {key: row for key, *row in reversed(changed)}
        left = [
            (*row, {key: value for key, value in options.items() if key not in first}) for *row, options in self.rows
        ]
        self.__init__([row for row in left if row[2]])
        for key, (path, module, options) in first.items():
            before = options[key]
            back = f"Set `{key}` to {before} again"
            if key == "training":
                back = f"Call `train({before})` on it, or on the model"
            tell(
                f"{path or type(module).__name__} has {key}={getattr(module, key)}, and had {before} when the step was "
                f"captured: a compiled step runs as the captured one did. {back}, or capture the step again",
                stacklevel + 1,
            )


def sources():
    """What the captured program called each input, by name."""
    return {row[0]: row[1] for row in (*INPUTS, *UPDATED)}


def addresses(tensors):
    return list(map(torch.Tensor.data_ptr, tensors))


def entries_of(optimizers):
    """All that the optimizers keep for their parameters, in order; not what else a program notes in their state."""
    kept = [entries for one in optimizers for entries in one.state.values() if isinstance(entries, dict)]
    return [one for entries in kept for one in entries.values()]


def are_of(module, options):
    return all(hasattr(module, key) for key in options)


def are_same(some, others):
    return len(some) == len(others) and all(map(operator.is_, some, others))


def fits(tensor, source, shape, stride, dtype, device):
    """ValueError where a tensor that is written in place lies elsewhere than the captured one, or otherwise."""
    if tensor.device.type != device:
        raise ValueError(
            f"{source} is on {tensor.device.type}, and the step was captured with it on {device}: move it back "
            f"(`model.to({device!r})`, and the optimizer's state by `optimizer.load_state_dict`), or capture the step again"
        )
    if (tensor.shape, tensor.dtype) != (shape, dtype) or (tensor.stride() != stride and tensor.numel() > 1):
        raise ValueError(
            f"{source} is {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}, and the step was captured with "
            f"{dtype}{list(shape)} and {stride}: capture it again"
        )


def model_order():
    """The models that a step takes, as a list."""
    return f"[{', '.join(one or 'model' for one in MODELS)}]"


class Bound:
    """Where a step's tensors are in models and optimizers, by the names that the capture knew them by."""

    def __init__(self, models, optimizers, others):
        self.models, self.optimizers, self.others = models, optimizers, others
        self.state, self.entries, self.there = [], [], []
        self.made = {}
        parts = {path: one for root, model in self.rooted() for path, one in model.named_modules(None, root, False)}
        known = [(path, parts[path], options) for path, options in MODES if path in parts]
        self.modes = Modes([(path, weakref.ref(one), options) for path, one, options in known if are_of(one, options)])

    def is_current(self):
        self.modes.tell(5)
        now = [part for one in self.optimizers for part in (one.state, one.param_groups)]
        is_same = are_same(now, self.state) and are_same(entries_of(self.optimizers), self.entries)
        # The parts of a TorchScript module have no `get`.
        return is_same and all(key in held and held[key] is tensor for held, key, tensor in self.there)

    def groups(self):
        return [one.param_groups for one in self.optimizers]

    def tensors(self):
        self.state = [part for one in self.optimizers for part in (one.state, one.param_groups)]
        self.entries = entries_of(self.optimizers)
        named = self.named()
        parts = [part for model in self.models for part in model.modules()]
        held = [one for part in parts for one in (part._parameters, part._buffers)]
        self.there = [(one, key, tensor) for one in held for key, tensor in one.items() if tensor is not None]
        rows = [(name, source, KINDS[name]) for i, (name, source, *_) in enumerate(INPUTS) if i not in DATA]
        rows += [row[:3] for i, row in enumerate(UPDATED) if i not in HANDED and i not in GIVEN]
        rows += [(name, source, "state") for name, (source, _, _) in COUNTS.items()]
        return {name: self.found(named, name, source, kind) for name, source, kind in rows}

    def rooted(self):
        """The models with what names of their tensors begin with, the last one first."""
        roots = MODELS if len(MODELS) > 1 else MODELS * len(self.models)
        return reversed(list(zip(roots, self.models, strict=False)))

    def named(self):
        named = {}
        for root, model in self.rooted():
            named |= dict(model.named_buffers(root, remove_duplicate=False))
            named |= dict(model.named_parameters(root, remove_duplicate=False))
        return named

    def check_models(self):
        """ValueError where one of several models is passed twice, or has the tensors of another one: they come in the order of
        MODELS."""
        if len(self.models) > len({id(model) for model in self.models}):
            raise ValueError(f"a model is passed twice: pass {model_order()}, each once")
        rows = [(source, shape) for name, source, shape, *_ in INPUTS if KINDS[name] in ("parameter", "buffer")]
        rows += [(source, shape) for _, source, kind, shape, *_ in UPDATED if kind in ("parameter", "buffer")]
        of_root = {root: [] for root in MODELS}
        for source, shape in rows:
            root = next((one for one in MODELS if one and source.startswith(f"{one}.")), "")
            of_root.get(root, []).append((source, shape))

        def is_like(model, root):
            held = (
                *model.named_parameters(root, remove_duplicate=False),
                *model.named_buffers(root, remove_duplicate=False),
            )
            shapes = {path: tensor.shape for path, tensor in held}
            return all(shapes.get(source) == shape for source, shape in of_root[root])

        pairs = list(zip(self.models, MODELS, strict=False))
        wrong = [(model, root) for model, root in pairs if not is_like(model, root)]
        if any(is_like(model, root) for model, _ in wrong for _, root in wrong) and len(MODELS) > 1:
            raise ValueError(f"the models come in another order than the step was captured with: pass {model_order()}")

    def order(self):
        """Put the optimizers in the order of OPTIMIZERS: each is known by a parameter that it updates. ValueError where none
        updates that."""
        named, found = self.named(), []
        for at, path in enumerate(OWNS):
            of = [self.optimizers[at], *self.optimizers]
            if path in named:
                of = [one for one in of if any(p is named[path] for group in one.param_groups for p in group["params"])]
            if not of:
                raise ValueError(
                    f"no optimizer updates {path}, which {OPTIMIZERS[at][0]} did when the step was captured: pass that one"
                )
            found.append(of[0])
        self.optimizers = found

    def found(self, named, name, source, kind):
        if name in self.others:
            return self.others[name]
        if name in RATES:
            return self.rate(name)
        if name in NUMBERS:
            return self.made.setdefault(name, torch.zeros((), dtype=self.dtype(name), device=RATE_DEVICES[name]))
        if name in CONSTANTS:
            return self.made.setdefault(name, torch.tensor(CONSTANTS[name][0], dtype=CONSTANTS[name][1]))
        if name in EMPTY:
            shape, dtype, device = EMPTY[name]
            return self.made.setdefault(name, torch.empty(shape, dtype=dtype, device=device))
        if kind == "state":
            key, _, path = source.partition(" of ")
            entries = [one.state[named[path]] for one in self.optimizers if path in named and named[path] in one.state]
            plain, _, index = key.partition("[")
            if entries and plain in entries[0]:
                return entries[0][plain][int(index[:-1])] if index else entries[0][plain]
            if path in named:
                raise ValueError(
                    f"the optimizer has no {source}: before the step is bound, let it make a step (`optimizer.step()` behind "
                    "a backward), or load its state (`optimizer.load_state_dict`)"
                )
        owner = named.get(source.removesuffix("_grad"))
        if source not in named and source.endswith("_grad") and owner is not None:
            if owner.grad is None:  # a step that keeps its gradients begins with none
                owner.grad = torch.zeros_like(owner)
            return owner.grad
        if source not in named:
            order = f"pass {model_order()} as the model, or " if len(MODELS) > 1 else "pass "
            line = f", which {LOOSE[name]} reads," if LOOSE.get(name) else ""
            raise ValueError(
                f"{source}{line} is not in the model or the optimizer: {order}tensors={ {name: 'the tensor'} }"
            )
        return named[source]

    def rate(self, name):
        optimizer, at = RATES[name]
        rate = self.optimizers[optimizer].param_groups[at]["lr"]
        dtype = self.dtype(name)
        if isinstance(rate, torch.Tensor) and rate.dtype is dtype:
            return rate
        return self.made.setdefault(name, torch.tensor(float(rate), dtype=dtype, device=RATE_DEVICES[name]))

    def dtype(self, name):
        return next(row[-1] for row in (*UPDATED, *INPUTS) if row[0] == name)


def bind(model, optimizer, tensors=None):
    """The step function of a model and its optimizer, which must have made a step: see `TrainingStep`.

    Several of either go in a list, models in the order of MODELS. `tensors` has by name what is in none of them.
    """
    models, optimizers = (list(x) if isinstance(x, (list, tuple)) else [x] for x in (model, optimizer))
    if len(optimizers) != len(OPTIMIZERS):
        raise ValueError(f"the step has {len(OPTIMIZERS)} optimizers, got {len(optimizers)}")
    if None in SEEDS:
        raise ValueError(
            "a backward started from a gradient that is not one number: reduce to a loss and capture it again"
        )
    bound = Bound(models, optimizers, dict(tensors or {}))
    bound.check_models()
    bound.order()
    for said in TOLD:
        tell(said, 3)
    bound.modes.tell(3)
    return TrainingStep(bound, example_cotangents(COTANGENT_DTYPES))


def example_operand(shape, stride, dtype, drawn, device, generator):
    """What an update reads, of the captured range."""
    memory = torch.empty(memory_size(shape, stride), dtype=dtype, device=device)
    if dtype.is_floating_point:
        mean, deviation, least, greatest = drawn
        return memory.normal_(mean, deviation, generator=generator).clamp_(least, greatest).as_strided(shape, stride)
    known = torch.tensor(drawn[1], dtype=dtype, device=device)
    return known[torch.arange(memory.numel(), device=device) % len(known)].as_strided(shape, stride)


def example_operands(rows, handed, inputs, made):
    """What the update of `rows` reads: copies of the inputs, what the backward gave, and drawn state."""
    generators = {}
    given = {row[0]: tensor for row, tensor in zip(INPUTS, inputs, strict=True)}
    operands = []
    for place, (name, _, _, *row) in enumerate(rows):
        if place in handed:
            kind, at = handed[place]
            operands.append(made[kind][at].clone())
        elif name in given:
            operands.append(made["written"].get(name, given[name]).clone())
        else:
            device, drawn = UPDATE_DRAWN[name]
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(2))
            operands.append(example_operand(*row, drawn, device, generator))
    return operands


def outputs(name, inputs):
    """All that one whole step of `programs` computes, by what it is: the new values of parameters and state too."""
    is_captured = name == "captured"
    front, back, read_again, mutated = programs()[name]
    results, written, behind, _ = replay(front, back, inputs, read_again, mutated)
    grads_of = CAPTURED_GRADIENTS if is_captured else GRADIENTS
    found = dict(zip(RESULTS, results, strict=True)) | dict(zip(LATE, behind, strict=False))
    found |= {f"new value of {of}": tensor for of, tensor in written.items()}
    found |= {f"gradient of {INPUTS[i][1]}": g.clone() for i, g in zip(grads_of, behind[len(LATE) :], strict=True)}
    rows, handed = (CAPTURED_UPDATED, CAPTURED_HANDED) if is_captured else (UPDATED, HANDED)
    operands = example_operands(rows, handed, inputs, {"results": results, "found": behind, "written": written})
    new = (captured_update if is_captured else update)(*operands)
    return found | dict(zip(CAPTURED_CHANGED if is_captured else CHANGED, new, strict=True))


TIMED = "forward + backward + update"


def timed_programs():
    """Of both programs a function that runs a whole step once, its update in place, and returns the seconds that it took."""
    inputs = example_inputs()
    updates = {
        "captured": (captured_update_in_place, CAPTURED_UPDATED, CAPTURED_HANDED, CAPTURED_LENT),
        "optimised": (update, UPDATED, HANDED, LENT),
    }

    def timed(name, front, back, read_again, mutated):
        new, rows, handed, lent = updates[name]
        results, written, found, _ = replay(front, back, inputs, read_again, mutated)
        operands = example_operands(rows, handed, inputs, {"results": results, "found": found, "written": written})
        del results, written, found

        def run():
            start = time.perf_counter()
            results, _, found, _ = replay(front, back, inputs, read_again, mutated, waits=False)
            made, given = {"results": results, "found": found}, list(operands)
            for place, (kind, at) in handed.items():
                given[place] = made[kind][at].clone() if place in lent else made[kind][at]
            del made, found
            new(*given)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        return run

    return {name: timed(name, *parts) for name, parts in programs().items()}


if __name__ == "__main__":
    main()
