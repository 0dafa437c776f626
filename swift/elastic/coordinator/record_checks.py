"""Checks of what iterations report: results that end a run."""

import math
from collections.abc import Callable

from swift.elastic.events import Reporter
from swift.errors import RunError


def check_finite(reporter: Reporter, step: int, remedy: Callable[[], str], **measured: float) -> None:
    """Raises RunError where a measured value of an iteration is not finite."""
    if all(map(math.isfinite, measured.values())):
        return
    reporter.note("not_finite", step, None, **measured)
    values = ", ".join(f"{name} = {value}" for name, value in measured.items())
    raise RunError(f"{values} at iteration {step}: stopped; {remedy()}")


def check_placed(reporter: Reporter, step: int, remedy: Callable[[], str], flaw: str | None) -> None:
    """Raises RunError where the placement of an iteration has a flaw."""
    if flaw is None:
        return
    reporter.note("misplaced", step, None, why=flaw)
    raise RunError(f"Experiment.placement: {flaw} at iteration {step}: stopped; correct the policy and {remedy()}")
