"""Event-driven simulation, which jumps from one change of nodes to the next without stepping through iterations.

``position`` computes the progress after some time at a constant pace. ``Outcome`` records how the time was spent, and
when iterations were kept.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swift.simulate.strategies import ClusterChange, Decision, IterationTiming, Saves, Strategy
from swift.simulate.traces import Trace

CAUSES = (
    "useful",
    "slowdown",
    "saving",
    "detection",
    "reconfiguration",
    "lost",
    "waiting",
    "out_of_memory",
)
"""Causes to which the simulated time is attributed; every moment has exactly one cause.

useful: kept iterations, counted at their duration with all nodes. slowdown: the rest of the duration of kept
iterations. saving: training waits for a checkpoint. detection: nodes have failed, but the failure is not detected yet.
reconfiguration: from the detection until training resumes, and the time to admit nodes. lost: iterations, or parts of
one, undone by a failure. waiting: there are too few nodes to train. out_of_memory: there are enough nodes to train, but
the model does not fit in their memory.
"""

_ROUNDING = 1e-9
"""Fraction of an iteration within which its end counts as reached, to tolerate float errors."""


@dataclass
class PaceInterval:
    """Interval of consecutive iterations at one pace. Times are in seconds.

    Attributes:
        start_s: start of the first iteration.
        end_s: end of the last iteration.
        iterations: number of iterations; fractional at the end of a trace.
        iteration_s: duration of each iteration, excluding saves.
        lost: number of iterations at the end of the interval that a failure undid.
    """

    start_s: float
    end_s: float
    iterations: float
    iteration_s: float
    lost: float = 0.0

    @property
    def kept(self) -> float:
        """Number of iterations that were not undone."""
        return self.iterations - self.lost


@dataclass(frozen=True)
class Outcome:
    """Result of simulating a strategy on a trace.

    Attributes:
        name: name of the strategy.
        source: source of the strategy's figures.
        iteration_s: duration of an iteration with all nodes, in seconds.
        samples: samples per iteration; None if unknown.
        horizon_s: length of the trace, in seconds.
        stretches: all iterations, including lost ones, in chronological order.
        spent_s: seconds attributed to each of ``CAUSES``; they sum to the horizon.
    """

    name: str
    source: str
    iteration_s: float
    samples: float | None
    horizon_s: float
    stretches: tuple[PaceInterval, ...]
    spent_s: dict[str, float]

    @property
    def iterations(self) -> float:
        """Number of iterations that were kept."""
        return sum(stretch.kept for stretch in self.stretches)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time divided by total time, which equals the mean goodput."""
        return self.spent_s["useful"] / self.horizon_s

    @property
    def samples_per_s(self) -> float | None:
        """Mean throughput over the trace, in samples of kept iterations per second; None if ``samples`` is unknown."""
        return None if self.samples is None else self.samples * self.iterations / self.horizon_s

    def goodput(self, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes goodput over time: kept iterations relative to a run without failures.

        Args:
            num_bins: number B of equal bins into which the trace is divided.

        Returns:
            Edges of the bins in seconds, float64[B + 1], and the mean goodput in each bin, float64[B].
        """
        # A failure undoes the last iterations of an interval: the count rises over the kept ones, then stays constant.
        times, counts = [0.0], [0.0]
        for stretch in self.stretches:
            share = stretch.kept / stretch.iterations if stretch.iterations else 0.0
            times += [stretch.start_s, stretch.start_s + share * (stretch.end_s - stretch.start_s)]
            counts += [counts[-1], counts[-1] + stretch.kept]
        edges = np.linspace(0.0, self.horizon_s, num_bins + 1)
        counts_at_edges = np.interp(edges, [*times, self.horizon_s], [*counts, counts[-1]])
        return edges, np.diff(counts_at_edges) * self.iteration_s / np.diff(edges)


class Position(NamedTuple):
    """Progress of training since the current pace began.

    Attributes:
        iterations: number of iterations finished.
        partial_s: time spent on the current iteration, in seconds.
        saving_s: time spent on saves, including the current one, in seconds.
        save_left_s: remaining time of the current save, in seconds.
        saved: number of iterations in the newest save that can be restored; 0 if there is none yet.
        stored: number of iterations in the newest save on storage that can be restored; 0 if there is none yet.
    """

    iterations: int
    partial_s: float
    saving_s: float
    save_left_s: float
    saved: int
    stored: int


def position(pace: IterationTiming, elapsed_s: float) -> Position:
    """Computes the progress after ``elapsed_s`` seconds at a constant pace, in constant time."""
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
    # The newest save may not be restorable yet; then the one before it counts.
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
    """Yields the intervals between saves, as (iterations before a save, number of consecutive saves that share it)."""
    yield from ((count, 1) for count in saves.first)
    yield saves.every, int(elapsed_s / iteration_s) + 2


def _split(seconds: float, iteration_s: float) -> tuple[int, float]:
    count = math.floor(seconds / iteration_s + _ROUNDING)
    return count, max(0.0, seconds - count * iteration_s)


def _stored(saves: Saves, done: int, saved: int) -> int:
    """Returns the number of iterations in the newest complete save to storage.

    A save to storage is complete when the next one starts.
    """
    if saves.storage_every is None:
        return saved
    return max(0, done // saves.storage_every - 1) * saves.storage_every


def simulate(strategy: Strategy, trace: Trace) -> Outcome:
    """Simulates a strategy on a trace. The simulation is deterministic.

    Args:
        strategy: strategy for handling failures.
        trace: times at which nodes leave and join.
    """
    state, decision = strategy.start(trace.initial)
    run = _Run(decision)
    for time_s, removed, added in trace.changes:
        if time_s == trace.horizon_s:  # a change at the very end has no time left to cost anything
            break
        run.advance(time_s)
        state, next_decision = strategy.change(state, run.moment(removed, added))
        if next_decision is not None:
            run.take(next_decision)
    run.advance(trace.horizon_s)
    run.close()
    spent = {cause: seconds for cause, seconds in run.spent_s.items() if cause not in ("useful", "slowdown")}
    useful_s = sum(stretch.kept for stretch in run.stretches) * strategy.iteration_s
    kept_s = sum(stretch.kept * stretch.iteration_s for stretch in run.stretches)
    spent_s = {"useful": useful_s, "slowdown": kept_s - useful_s, **spent}
    return Outcome(
        strategy.name,
        strategy.source,
        strategy.iteration_s,
        strategy.samples,
        trace.horizon_s,
        tuple(run.stretches),
        {cause: max(0.0, spent_s[cause]) for cause in CAUSES},
    )


@dataclass
class _Finish:
    """Phase that finishes the current iteration before a pause. Times are in seconds.

    Attributes:
        start_s: start of the iteration.
        spent_s: time spent on the iteration so far.
        left_s: time until the iteration is finished.
        share: fraction of the iteration's work that is done.
    """

    start_s: float
    spent_s: float
    left_s: float
    share: float


@dataclass
class _Standstill:
    cause: str
    left_s: float


class _Saved:
    """Marker between phases for a complete save: later restores return to the progress made up to this point."""

    left_s = 0.0


class _Run:
    """A simulated run, which is in the first of its phases or, if there are none, runs at its current pace."""

    def __init__(self, decision: Decision):
        self.time_s = 0.0
        self.spent_s = dict.fromkeys(CAUSES, 0.0)
        self.stretches: list[PaceInterval] = []
        self.iterations_run = 0
        self._done = self._saved = self._stored = 0  # iterations: finished, in the newest save, in storage
        self._phases = deque[_Finish | _Standstill | _Saved]()
        self._pace: IterationTiming | None = None
        self._waits_for = "waiting"
        self._since_s = 0.0  # start of the current pace
        self.take(decision)

    def moment(self, removed: tuple[str, ...], added: tuple[str, ...]) -> ClusterChange:
        """Describes a change of nodes at the current time, for the strategy."""
        run = self._position().iterations
        is_running = self._pace is not None and not self._phases
        return ClusterChange(removed, added, self.iterations_run + run, self._done + run, is_running)

    def advance(self, until_s: float) -> None:
        """Advances to the time ``until_s``; there must be no change of nodes before it."""
        while self._phases:
            phase = self._phases[0]
            step_s = min(phase.left_s, until_s - self.time_s)
            self.time_s += step_s
            if isinstance(phase, _Standstill):
                self.spent_s[phase.cause] += step_s
                phase.left_s -= step_s
            elif isinstance(phase, _Finish):
                phase.share += (1 - phase.share) * (step_s / phase.left_s if phase.left_s else 1.0)
                phase.spent_s += step_s
                phase.left_s -= step_s
            if phase.left_s > 1e-12 * max(1.0, self.time_s):
                return
            self._phases.popleft()
            if isinstance(phase, _Finish):
                self._count(PaceInterval(phase.start_s, self.time_s, 1, phase.spent_s))
            elif isinstance(phase, _Saved):
                self._saved = self._stored = self._done
            self._since_s = self.time_s
        if self._pace is None:
            self.spent_s[self._waits_for] += until_s - self.time_s
            self._since_s = until_s
        self.time_s = until_s

    def take(self, decision: Decision) -> None:
        """Applies a strategy's decision.

        Records the progress so far, and finishes or discards the current iteration. Then the pauses follow, and then
        the new pace.
        """
        at = self._leave_pace()
        if decision.loses == "nothing":
            self._finish_first(at, decision.stretch)
        else:
            self._lose_iteration(at)
        if decision.loses in ("checkpoint", "storage"):
            self._go_back(self._saved if decision.loses == "checkpoint" else self._stored)
        if decision.saved:
            self._phases.append(_Saved())
        self._phases += (_Standstill(cause, seconds) for cause, seconds in decision.pauses if seconds > 0)
        self._pace, self._waits_for, self._since_s = decision.pace, decision.waits_for, self.time_s

    def close(self) -> None:
        """Ends the run, and counts the fraction of the current iteration that is done."""
        at = self._leave_pace()
        if self._pace is not None and at.partial_s:
            T = self._pace.iteration_s
            self.stretches.append(PaceInterval(self.time_s - at.partial_s, self.time_s, at.partial_s / T, T))
        for phase in self._phases:
            if isinstance(phase, _Finish):
                iteration_s = phase.spent_s / phase.share
                self.stretches.append(PaceInterval(phase.start_s, self.time_s, phase.share, iteration_s))

    def _position(self) -> Position:
        if self._pace is None or self._phases:
            return Position(0, 0.0, 0.0, 0.0, 0, 0)
        return position(self._pace, self.time_s - self._since_s)

    def _leave_pace(self) -> Position:
        """Records the progress made at the current pace."""
        at = self._position()
        if at.saved:
            self._saved = self._done + at.saved
        if at.stored:
            self._stored = self._done + at.stored
        if at.iterations and self._pace is not None:
            end_s = self.time_s - at.partial_s
            self._count(PaceInterval(self._since_s, end_s, at.iterations, self._pace.iteration_s))
        self.spent_s["saving"] += at.saving_s
        return at

    def _count(self, stretch: PaceInterval) -> None:
        self.stretches.append(stretch)
        self.iterations_run += int(stretch.iterations)
        self._done += int(stretch.iterations)

    def _finish_first(self, at: Position, stretch: float) -> None:
        for phase in self._phases:
            if isinstance(phase, _Finish):
                phase.left_s *= stretch
        if at.partial_s and self._pace is not None:
            left_s = (self._pace.iteration_s - at.partial_s) * stretch
            share = at.partial_s / self._pace.iteration_s
            self._phases.append(_Finish(self.time_s - at.partial_s, at.partial_s, left_s, share))
        if at.save_left_s:
            self._phases.append(_Standstill("saving", at.save_left_s))

    def _lose_iteration(self, at: Position) -> None:
        """Discards the current iteration and all remaining phases."""
        begun_s = sum(phase.spent_s for phase in self._phases if isinstance(phase, _Finish))
        self.spent_s["lost"] += at.partial_s + begun_s
        self._phases.clear()

    def _go_back(self, to: int) -> None:
        """Rolls back to the state after ``to`` iterations, and marks the iterations after it as lost."""
        surplus, self._done = float(self._done - to), to
        self._saved, self._stored = to, min(self._stored, to)
        for stretch in reversed(self.stretches):
            if surplus <= 0:
                break
            lost = min(stretch.kept, surplus)
            stretch.lost += lost
            surplus -= lost
            self.spent_s["lost"] += lost * stretch.iteration_s
