"""Volleys: faults that come together, and their times, determined by a seed alone."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from . import evidence
from .kinds import Kind, Parameters
from .running import Run

_SIZES = (1, 2, 2, 3, 3, 4)
_MOMENT_S = 8.0
"""Time to wait for a fault's moment; after that it strikes at once."""


@dataclass(frozen=True)
class Fault:
    """One fault of a volley.

    Attributes:
        kind: its name.
        moment: what it waits for: nothing (`now`), a `save` that begins, a group that is to form
            (`generation_forming`), or that has formed (`generation_live`).
        delay_s: seconds after that.
        parameters: of its kind.
    """

    kind: str
    moment: str
    delay_s: float
    parameters: Parameters

    def document(self) -> dict[str, Any]:
        """Describes a fault for the record."""
        return asdict(self)


class Deck:
    """Kinds in random order, each of which is drawn once before any is repeated.

    Args:
        kinds: that may come.
        rng: decides.
        comes_again: whether any comes a second time.
    """

    def __init__(self, kinds: Sequence[Kind], rng: Random, *, comes_again: bool = True):
        self._kinds, self._rng, self._comes_again = list(kinds), rng, comes_again
        self._left = rng.sample(self._kinds, len(self._kinds))

    @property
    def left(self) -> list[str]:
        """Names of kinds that have not been drawn yet."""
        return [kind.name for kind in self._left]

    def volley(self, run: Run) -> list[Fault]:
        """Draws one to four faults that can come together; one that ends the life is the last."""
        size, faults, kinds, groups = self._rng.choice(_SIZES), list[Fault](), list[Kind](), set[str]()
        for _ in range(size):
            kind = self._deal(run, groups)
            if kind is None:
                break
            groups |= {kind.group} - {""}
            moment = self._rng.choice(kind.moments(regroups=any(other.regroups for other in kinds)))
            delay_s = round(self._rng.uniform(0, 0.6 if moment != "now" or faults else 1.5), 3)
            faults.append(Fault(kind.name, moment, delay_s, kind.draw(self._rng, run)))
            kinds.append(kind)
            if kind.ends:
                break
        return faults

    def _deal(self, run: Run, groups: set[str]) -> Kind | None:
        if self._comes_again and not any(kind.fits(run) for kind in self._left):
            self._left = self._rng.sample(self._kinds, len(self._kinds))
        for kind in self._left:
            if kind.fits(run) and kind.group not in groups:
                self._left.remove(kind)
                return kind
        return None


def wait_for_moment(run: Run, fault: Fault) -> bool:
    """Waits until a fault is due; returns True if its moment has come."""
    path = run.run_dir / "events.jsonl"
    deadline, seen, known, size = time.monotonic() + _MOMENT_S, fault.moment == "now", len(run.events()), _size(path)
    while not seen and time.monotonic() < deadline and not run.is_over():
        if fault.moment == "save":
            seen = evidence.is_saving(run.run_dir)
        elif size != (size := _size(path)):
            seen = any(event["event"] == fault.moment for event in run.events()[known:])
        run.meanwhile()
        time.sleep(0.004)
    time.sleep(fault.delay_s)
    return seen


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
