"""A beam search over what all workers do, tick by tick, where a tick takes as long as its longest op.

R: live workers, S: states, c: counters of a worker, which say how far it is.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np


class Step(NamedTuple):
    """One way to run the next tick, from each of S states.

    Attributes:
        length: how long the tick takes.
        ran_cSR: bool, the counters that it moves on by one.
        possible_S: bool, from which states it can be done.
    """

    length: float
    ran_cSR: np.ndarray
    possible_S: np.ndarray


class Space(Protocol):
    """What is searched: states are int64[c, S, R]."""

    start_cR: np.ndarray
    end_cR: np.ndarray

    def steps(self, state_cSR: np.ndarray) -> Iterator[Step]:
        """The ways to run the next tick."""

    def time_left(self, state_cSR: np.ndarray) -> np.ndarray:
        """float64[S]: an estimate of the time from each state to the end."""


class _Choice(NamedTuple):
    """The states that were kept in one tick: the state before, and what ran."""

    before_S: np.ndarray
    ran_cSR: np.ndarray


def beam_search(space: Space, width: int, cost_per_tick: float) -> np.ndarray | None:
    """The cheapest way from start to end that is found by keeping the ``width`` most promising states of every tick.

    Args:
        space: to search.
        width: S at most.
        cost_per_tick: what every tick costs above its length, so that of two ways that take as long the one with fewer
            ticks is found.

    Returns:
        bool[T, c, R], what moves on in each tick; None if all states that were kept came to a dead end.
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
    """The states with the lowest estimates, the same state (by its mark) once."""
    order = np.argsort(estimate, kind="stable")
    _, first = np.unique(mark[order], return_index=True)
    return order[np.sort(first)[:width]]


def _path(choices: list[_Choice], last: int) -> np.ndarray:
    ran = []
    for choice in reversed(choices):
        ran.append(choice.ran_cSR[:, last])
        last = int(choice.before_S[last])
    return np.array(ran[::-1])
