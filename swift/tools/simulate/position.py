"""Progress of training after some time at a pace, computed without stepping through iterations."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from swift.tools.simulate.strategies.strategy import Pace, Saves

_ROUNDING = 1e-9
"""Share of an iteration within which its end counts as reached."""


class Position(NamedTuple):
    """Progress of training.

    Attributes:
        iterations: iterations finished at this pace.
        partial_s: time spent on the current iteration.
        saving_s: time spent on saves, including the current one.
        save_left_s: time left for the current save.
        saved: iterations in the newest save that can be restored; 0 if there is none yet.
        stored: the same for saves to storage.
    """

    iterations: int
    partial_s: float
    saving_s: float
    save_left_s: float
    saved: int
    stored: int


def position(pace: Pace, elapsed_s: float) -> Position:
    """Computes the progress after ``elapsed_s`` seconds at a pace."""
    T, saves = pace.iteration_s, pace.saves
    if saves is None:
        iterations, partial_s = _split(elapsed_s, T)
        return Position(iterations, partial_s, 0.0, 0.0, 0, 0)
    done, saving_s, left_s, latest, before = 0, 0.0, elapsed_s, 0, 0
    for count, times in _stretches(saves, elapsed_s, T):
        cycle_s = count * T + saves.stall_s
        whole = min(times, int((left_s + _ROUNDING * T) // cycle_s))
        if whole:
            done, saving_s, left_s = done + whole * count, saving_s + whole * saves.stall_s, left_s - whole * cycle_s
            before, latest = done - count, done
        if whole < times:
            break
    left_s = max(0.0, left_s)
    iterations, partial_s = _split(min(left_s, count * T), T)
    in_save_s = max(0.0, left_s - count * T) if iterations == count else 0.0
    done += iterations
    saved = latest if done - latest >= saves.lag else before
    return Position(
        done,
        0.0 if iterations == count else partial_s,
        saving_s + in_save_s,
        saves.stall_s - in_save_s if iterations == count else 0.0,
        saved,
        _stored(saves, done, saved),
    )


def _stretches(saves: Saves, elapsed_s: float, iteration_s: float) -> Iterator[tuple[int, int]]:
    """Yields (iterations before a save, number of consecutive such saves)."""
    yield from ((count, 1) for count in saves.first)
    yield saves.every, int(elapsed_s / iteration_s) + 2


def _split(seconds: float, iteration_s: float) -> tuple[int, float]:
    count = math.floor(seconds / iteration_s + _ROUNDING)
    return count, max(0.0, seconds - count * iteration_s)


def _stored(saves: Saves, done: int, saved: int) -> int:
    """Iterations in the newest complete save to storage; a save is complete when the next one starts."""
    if saves.storage_every is None:
        return saved
    return max(0, done // saves.storage_every - 1) * saves.storage_every
