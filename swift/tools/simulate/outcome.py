"""What came of a simulated run: where its time went, what it kept, and how both went on over time."""

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
"""What time is spent on, each moment counted once.

useful: iterations that are kept, each at what it takes while all nodes are there. slowdown: what they took longer.
saving: training waits for a checkpoint. detection: nodes have failed, and nobody knows.
reconfiguration: from then until training goes on, and what it takes to let nodes join.
lost: iterations, or a part of one, that a failure undid. waiting: there are too few nodes.
out_of_memory: there are enough to run, but not to hold the model.
"""


@dataclass
class PaceInterval:
    """Iterations of one pace, one after the other.

    Attributes:
        start_s: when the first began.
        end_s: when the last ended.
        iterations: how many; not whole at the end of a trace.
        iteration_s: of each, without saves.
        lost: how many of them a failure undid, the last ones.
    """

    start_s: float
    end_s: float
    iterations: float
    iteration_s: float
    lost: float = 0.0

    @property
    def kept(self) -> float:
        """How many were not undone."""
        return self.iterations - self.lost


@dataclass(frozen=True)
class Outcome:
    """A strategy's run through a trace.

    Attributes:
        name: of the strategy.
        source: whose figures the strategy follows.
        iteration_s: of the strategy while all nodes are there.
        samples: of an iteration, where they are known.
        horizon_s: the length of the trace.
        stretches: the iterations, by time.
        spent_s: the time for each of ``CAUSES``; their sum is the horizon.
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
        """How many iterations are kept."""
        return sum(stretch.kept for stretch in self.stretches)

    @property
    def ettr(self) -> float:
        """The effective training time ratio: useful time over all time. It is the mean goodput, too."""
        return self.spent_s["useful"] / self.horizon_s

    @property
    def samples_per_s(self) -> float | None:
        """Mean throughput of samples whose iterations are kept."""
        return None if self.samples is None else self.samples * self.iterations / self.horizon_s

    def goodput(self, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Kept iterations over time, as a share of what there would be without failures.

        Args:
            num_bins: how many equal parts of the trace to average over; B.

        Returns:
            The ends of the bins float64[B + 1] in seconds, and the goodput in each, float64[B].
        """
        times, counts = [0.0], [0.0]
        for stretch in self.stretches:
            share = stretch.kept / stretch.iterations if stretch.iterations else 0.0
            times += [stretch.start_s, stretch.start_s + share * (stretch.end_s - stretch.start_s)]
            counts += [counts[-1], counts[-1] + stretch.kept]
        edges = np.linspace(0.0, self.horizon_s, num_bins + 1)
        kept = np.interp(edges, [*times, self.horizon_s], [*counts, counts[-1]])
        return edges, np.diff(kept) * self.iteration_s / np.diff(edges)
