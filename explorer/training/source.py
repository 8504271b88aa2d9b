"""The text of a whole step's file: that of its forward and backward, and the update beside them, in place.

update              the optimised update: new values go where the old ones lie
captured_update     as it was captured: what the file checks itself against, and in place what it is timed beside
whole_step          forward, backward and update on tensors
bind                the step function of a model and its optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tracefuse.execution.export import Further, kernel_texts, module_source, rendered
from tracefuse.execution.in_place import in_place
from tracefuse.execution.optimised import Optimised
from tracefuse.optimizers.trace import Trace
from tracefuse.steps.steps import Steps
from tracefuse.training.step_tables import Parts, tables

_FILE = (Path(__file__).parent / "exported_step.py").read_text()
_IMPORTS = ("contextlib", "operator", "warnings", "weakref")
_RUNTIME = _FILE.split("# --- copied into every exported file of a whole step ---\n")[1]

ABOUT = (
    "`bind(model, optimizer)` returns the step: a function of the data listed in INPUTS at DATA, which runs forward, backward",
    "and update, writes parameters, buffers and the optimizer's state where they are, and returns STEP_RESULTS. `.grad` stays",
    "as it is. The optimizer must have made a step before, which makes its state, or have loaded one; learning rates are read",
    "from its `param_groups` at each call, and schedules and the optimizer's hooks are yours to run. Shapes, strides and",
    "dtypes must be those of INPUTS and UPDATED. Results, gradients and new values are checked: by dtype within TOLERANCE of",
    "the captured step.",
    "",
)  # fmt: skip


def step_source(joint: Optimised, update: Optimised, steps: Steps | None = None, told: Sequence[str] = ()) -> str:
    """The file of a step: `joint` is its forward and backward, `update` its update, with rates as inputs. `steps` say which of
    these change from step to step, and `told` is what binding it warns of. Raises `ExportError` where the two do not belong
    together, and for what is no step."""
    known = set(kernel_texts(joint))
    kernels = tuple(text for name, text in kernel_texts(update).items() if name not in known)
    captured = rendered(update.program.trace).replace("def update(", "def captured_update(", 1)
    timed = rendered(in_place(update.program.trace)).replace("def update(", "def captured_update_in_place(", 1)
    made = _read(update.trace)
    texts = "\n".join(tables(Parts(joint, update.program, made), steps, told))
    return module_source(
        joint, Further(ABOUT, kernels, rendered(in_place(made)), f"{captured}\n{timed}", texts, _RUNTIME, _IMPORTS)
    )


def _read(update: Trace) -> Trace:
    """`update` with the inputs that it reads or writes alone: of a frozen parameter there are others."""
    new, written = update.copy(), {out.of for out in update.outputs}
    for placeholder in new.placeholders:
        if not placeholder.users and placeholder.name not in written:
            new.graph.erase_node(placeholder)
    left = {placeholder.name for placeholder in new.placeholders}
    return replace(new, inputs=tuple(i for i in new.inputs if i.name in left))
