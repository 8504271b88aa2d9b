"""A fixture for pytest: `assert_findings(step)` fails a test in which a training step has findings.

    def test_the_step_is_healthy(assert_findings):
        assert_findings(lambda: model(batch).loss.backward(), allow=["tf32-off"])

pytest finds it by the entry point `pytest11` of the installed package. Nothing heavy is imported before it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings


def check_findings(
    step: Any, *args: Any, allow: Iterable[str] = (), severity: str = "medium", target: str | None = None
) -> Findings:
    """Raise `AssertionError` where the program has a finding of at least `severity` ("high", "medium", "low") as it ran.

    `step` is a function, which is called once with `args` and captured, or a capture. `allow` are ids of findings that may be
    there (`tracefuse.findings.kinds.KINDS`); a comment `# tracefuse: ignore[id]` on a line allows one there. `target` is the
    GPU to price for, as of `tracefuse.target`, in this call only. Returns all findings. Raises `OptionError` for an id, a
    severity or a target that does not exist, and what capturing raises.
    """
    import tracefuse
    from tracefuse.device.target import priced_for
    from tracefuse.findings.finding import SEVERITIES
    from tracefuse.text import counted

    _check("id of a finding", allow := tuple(allow), _ids())
    _check("severity", (severity,), SEVERITIES)
    with priced_for(target):
        capture = step if hasattr(step, "findings") else tracefuse.capture(step, *args)
        findings = capture.findings()
    grave = SEVERITIES[: SEVERITIES.index(severity) + 1]  # type: ignore[arg-type]
    found = [one for one in findings if one.severity in grave and one.id not in allow]
    if found:
        head = f"{counted(len(found), 'finding')} of severity {severity} or more: mend, pass allow=[id], or write"
        raise AssertionError("\n\n".join([f"{head} `# tracefuse: ignore[id]` on the line", *map(str, found)]))
    return findings


def _ids() -> tuple[str, ...]:
    from tracefuse.findings.kinds import KINDS

    return tuple(KINDS)


def _check(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    from tracefuse.errors import OptionError
    from tracefuse.optimizers.errors import nearest

    for one in given:
        if one not in known:
            near = nearest(one, known)
            meant = f"did you mean {near}? " if near else ""
            raise OptionError(f"there is no {what} {one!r}: {meant}choose from {', '.join(known)}")


@pytest.fixture
def assert_findings() -> Callable[..., Findings]:
    """`assert_findings(step, *args, allow=[…], severity="medium", target=None)`, as `check_findings` of this module."""
    return check_findings
