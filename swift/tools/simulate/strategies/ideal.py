"""The fault-scaled ideal: throughput proportional to the live workers, at no other cost."""

from dataclasses import dataclass

from swift.tools.simulate.job import Job
from swift.tools.simulate.strategies.strategy import Moment, Pace, Turn


@dataclass(frozen=True)
class Ideal:
    """Fault-free throughput times the share of live workers (ReCycle, arXiv 2405.14009).

    Nothing is lost and no one waits. It is not an upper bound: where the pipeline has bubbles, the work of a failed
    worker may fit into them.
    """

    job: Job
    name = "ideal"
    source = "fault-free throughput x live share"
    samples = None

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration of the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[int, Turn]:
        """Starts with all nodes; the state is their number."""
        return len(nodes), Turn(self._pace(len(nodes)))

    def change(self, state: int, moment: Moment) -> tuple[int, Turn]:
        """Changes the pace immediately, in the middle of an iteration."""
        num_nodes = state + len(moment.added) - len(moment.removed)
        before, pace = self._pace(state), self._pace(num_nodes)
        if before is None or pace is None:
            return num_nodes, Turn(pace, "iteration")
        return num_nodes, Turn(pace, stretch=pace.iteration_s / before.iteration_s)

    def _pace(self, num_nodes: int) -> Pace | None:
        live = min(num_nodes, self.job.num_workers)
        return Pace(self.job.iteration_s * self.job.num_workers / live) if live else None
