"""The fault-scaled ideal: what nodes that fail take with them, and nothing else."""

from dataclasses import dataclass

from swift.tools.simulate.job import Job
from swift.tools.simulate.strategies.strategy import Moment, Pace, Turn


@dataclass(frozen=True)
class Ideal:
    """Throughput without failures times the share of workers that are live (ReCycle, arXiv 2405.14009).

    Nothing is lost and nobody waits. It is no bound of what can be done: where the pipeline has bubbles, the work of a
    failed worker may fit into them.
    """

    job: Job
    name = "ideal"
    source = "fault-free throughput x live share"
    samples = None

    @property
    def iteration_s(self) -> float:
        """That of the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[int, Turn]:
        """The state is the number of nodes."""
        return len(nodes), Turn(self._pace(len(nodes)))

    def change(self, state: int, moment: Moment) -> tuple[int, Turn]:
        """From now on, in the midst of an iteration, all goes faster or slower."""
        num_nodes = state + len(moment.added) - len(moment.removed)
        before, pace = self._pace(state), self._pace(num_nodes)
        if before is None or pace is None:
            return num_nodes, Turn(pace, "iteration")
        return num_nodes, Turn(pace, stretch=pace.iteration_s / before.iteration_s)

    def _pace(self, num_nodes: int) -> Pace | None:
        live = min(num_nodes, self.job.num_workers)
        return Pace(self.job.iteration_s * self.job.num_workers / live) if live else None
