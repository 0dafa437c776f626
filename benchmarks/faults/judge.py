"""Judge: complaints about a run, of which a run that keeps its promises has none."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from .terminals import UNHEARD

GIVES_UP = 3
"""Exit code of a run that gives up, with a message."""
TOLERANCE = 1e-8
"""Relative tolerance of a loss."""
_NAMES_FAULT = re.compile(r"^swift: .{10,}", re.MULTILINE)


def of_losses(found: Mapping[int, float], expected: Mapping[int, float], excused: Collection[int] = ()) -> list[str]:
    """Checks that every recorded loss is that of the run without faults.

    Args:
        found, expected: losses by iteration.
        excused: iterations whose records were damaged on purpose.
    """
    checked = {step: loss for step, loss in found.items() if step not in excused}
    wrong = [step for step, loss in checked.items() if step not in expected or not _is_close(loss, expected[step])]
    if not wrong:
        return []
    step = min(wrong)
    told = f"{found[step]} instead of {expected.get(step)}"
    return [f"{len(wrong)} losses are wrong, the first that of iteration {step}: {told}"]


def of_gaps(found: Collection[int], excused: Collection[int] = ()) -> list[str]:
    """Checks that every iteration before the last is recorded."""
    missing = set(range(1, max(found, default=0) + 1)) - set(found) - set(excused)
    return [f"{len(missing)} iterations are not recorded, the first {min(missing)}"] if missing else []


def _is_close(loss: Any, expected: float) -> bool:
    return isinstance(loss, int | float) and abs(loss - expected) <= TOLERANCE * abs(expected)


def of_terminal(said: str) -> list[str]:
    """Checks that the user saw no internals, such as tracebacks."""
    found = said.find("Traceback (most recent call last)")
    return [] if found < 0 else [f"a traceback on the terminal: {' '.join(said[found : found + 3000].split())[-400:]}"]


def codes_of_end(codes: Collection[int], is_record_damaged: bool) -> set[int]:
    """Exit codes of a run that ends: a record that was damaged, and cannot be summed up, costs it its success."""
    return set(codes) - {0} | {GIVES_UP} if is_record_damaged and 0 in codes else set(codes)


def of_exit(code: int, allowed: Collection[int], said: str) -> list[str]:
    """Checks that a run ended with an allowed code, and with a reason if it gave up."""
    if code not in allowed:
        last = " / ".join(said.strip().splitlines()[-3:])
        return [f"exit code {code}, and not {' or '.join(map(str, sorted(allowed)))}: {last[-400:]}"]
    if code in (2, 3) and said != UNHEARD and not _NAMES_FAULT.search(said):
        return [f"exit code {code} without a sentence that says why"]
    return []


def of_restore(event: Mapping[str, Any], promised: int | None, may_be_older: bool) -> list[str]:
    """Checks that a run resumed from the newest state that it had promised.

    Args:
        event: `resume` or `restore`, with its iteration.
        promised: iteration of the newest checkpoint reported before.
        may_be_older: True if a checkpoint was damaged.
    """
    if promised is None or may_be_older or event["step"] >= promised:
        return []
    return [f"{event['event']} at iteration {event['step']}, though the checkpoint of {promised} was promised"]
