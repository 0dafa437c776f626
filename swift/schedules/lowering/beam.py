"""Beam search over the ops of all workers, tick by tick, where a tick takes as long as its longest op.

R: live workers, S: states, c: counters of a worker's progress.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np


class Step(NamedTuple):
    """One way to run the next tick, from each of S states.

    Attributes:
        length: duration of the tick.
        ran_cSR: bool, counters that advance by one.
        possible_S: bool, states from which the step is possible.
    """

    length: float
    ran_cSR: np.ndarray
    possible_S: np.ndarray


class Space(Protocol):
    """Space to search; states are int64[c, S, R]."""

    start_cR: np.ndarray
    end_cR: np.ndarray

    def steps(self, state_cSR: np.ndarray) -> Iterator[Step]:
        """Yields the ways to run the next tick."""

    def time_left(self, state_cSR: np.ndarray) -> np.ndarray:
        """Estimates the time from each state to the end, float64[S]."""


class _Choice(NamedTuple):
    """States kept after one tick: the previous state of each, and what ran."""

    before_S: np.ndarray
    ran_cSR: np.ndarray


def beam_search(space: Space, width: int, cost_per_tick: float) -> np.ndarray | None:
    """Finds a cheap path from start to end, keeping the ``width`` most promising states of every tick.

    Args:
        space: space to search.
        width: largest number of states kept, S.
        cost_per_tick: cost of a tick beyond its length, which makes the search prefer fewer ticks among paths of equal
            duration.

    Returns:
        bool[T, c, R], the counters that advance in each tick; None if all kept states reached dead ends.
    """
    state, spent = space.start_cR[:, None], np.zeros(1)
    choices: list[_Choice] = []
    best, found = np.inf, None
    marks = np.random.default_rng(0).integers(1, 2**62, space.start_cR.shape)
    while True:
        steps = [step for step in space.steps(state) if step.possible_S.any()]
        if not steps:
            return found
        before = np.concatenate([np.flatnonzero(step.possible_S) for step in steps])
        ran = np.concatenate([step.ran_cSR[:, step.possible_S] for step in steps], axis=1)
        lengths = np.repeat([step.length for step in steps], [np.count_nonzero(step.possible_S) for step in steps])
        state, spent = state[:, before] + ran, spent[before] + lengths + cost_per_tick
        kept = _kept(spent + space.time_left(state), np.einsum("cSR,cR->S", state, marks), width)
        state, spent = state[:, kept], spent[kept]
        choices.append(_Choice(before[kept], ran[:, kept]))
        ended = (state == space.end_cR[:, None]).all(axis=(0, 2))
        if ended.any():
            last = np.flatnonzero(ended)[np.argmin(spent[ended])]
            if spent[last] < best:
                best, found = spent[last], _path(choices, int(last))
            going = np.flatnonzero(~ended & (spent < best))
            if not len(going):
                return found
            state, spent = state[:, going], spent[going]
            choices[-1] = _Choice(choices[-1].before_S[going], choices[-1].ran_cSR[:, going])


def _kept(estimate: np.ndarray, mark: np.ndarray, width: int) -> np.ndarray:
    """Selects the states with the lowest estimates, each distinct state (by its hash) once."""
    order = np.argsort(estimate, kind="stable")
    _, first = np.unique(mark[order], return_index=True)
    return order[np.sort(first)[:width]]


def _path(choices: list[_Choice], last: int) -> np.ndarray:
    ran = []
    for choice in reversed(choices):
        ran.append(choice.ran_cSR[:, last])
        last = int(choice.before_S[last])
    return np.array(ran[::-1])
