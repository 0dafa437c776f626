"""Outcome of a simulated run: where its time went, and the iterations that it kept, over time."""

from dataclasses import dataclass

import numpy as np

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
"""Causes on which time is spent; each moment has one.

useful: iterations that are kept, at their duration with all nodes. slowdown: the rest of their duration.
saving: training waits for a checkpoint. detection: nodes have failed, and the failure is not known yet.
reconfiguration: from then until training resumes, and the time to let nodes join.
lost: iterations, or a part of one, undone by a failure. waiting: there are too few nodes.
out_of_memory: there are enough nodes to run, but not to hold the model.
"""


@dataclass
class PaceInterval:
    """Consecutive iterations at one pace.

    Attributes:
        start_s: start of the first iteration.
        end_s: end of the last iteration.
        iterations: number of iterations; fractional at the end of a trace.
        iteration_s: duration of each, without saves.
        lost: number of the last iterations that a failure undid.
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
    """Outcome of a strategy on a trace.

    Attributes:
        name: name of the strategy.
        source: source of the strategy's figures.
        iteration_s: duration of an iteration with all nodes.
        samples: samples of an iteration; None if unknown.
        horizon_s: length of the trace.
        stretches: iterations in order of time.
        spent_s: seconds spent on each of ``CAUSES``; they sum to the horizon.
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
        """Number of iterations that are kept."""
        return sum(stretch.kept for stretch in self.stretches)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time over all time, which is also the mean goodput."""
        return self.spent_s["useful"] / self.horizon_s

    @property
    def samples_per_s(self) -> float | None:
        """Mean throughput, in samples of kept iterations."""
        return None if self.samples is None else self.samples * self.iterations / self.horizon_s

    def goodput(self, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes goodput over time: kept iterations relative to those without failures.

        Args:
            num_bins: number of equal parts of the trace to average over, B.

        Returns:
            The edges of the bins in seconds, float64[B + 1], and the goodput in each, float64[B].
        """
        times, counts = [0.0], [0.0]
        for stretch in self.stretches:
            share = stretch.kept / stretch.iterations if stretch.iterations else 0.0
            times += [stretch.start_s, stretch.start_s + share * (stretch.end_s - stretch.start_s)]
            counts += [counts[-1], counts[-1] + stretch.kept]
        edges = np.linspace(0.0, self.horizon_s, num_bins + 1)
        kept = np.interp(edges, [*times, self.horizon_s], [*counts, counts[-1]])
        return edges, np.diff(kept) * self.iteration_s / np.diff(edges)
