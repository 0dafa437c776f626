"""Which runs are elastic, and their programs on any number of expert ranks."""

from collections.abc import Sequence

from swift.elastic.membership import Process
from swift.mesh import storage_mesh
from swift.pipeline import StepSpec
from swift.train import Experiment


def is_elastic(experiment: Experiment, *, by_rank: bool) -> bool:
    """Whether expert ranks continue without those that are lost, see ``swift.elastic.membership.shard_ownership``.

    Args:
        experiment: what is run.
        by_rank: whether each expert rank has a process.
    """
    is_single_worker = len(experiment.topology.workers) == 1
    return by_rank and is_single_worker and experiment.optimizer.layout == "decoupled"


class ElasticPrograms:
    """The programs of a run on any number of expert ranks, each on the mesh that holds what a checkpoint has.

    Args:
        experiment: what is run.
    """

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._by_ranks: dict[int, StepSpec] = {}

    def on(self, num_ranks: int) -> StepSpec:
        """The program on so many ranks; to be put on a live mesh."""
        if num_ranks not in self._by_ranks:
            fewer = self._experiment.on_ranks(num_ranks)
            self._by_ranks[num_ranks] = fewer.step_spec(storage_mesh(fewer.topology))
        return self._by_ranks[num_ranks]


def holder_of(process: Process, processes: Sequence[Process]) -> Process:
    """Whose memory a process's slices are copied to: the buddy, which is the next in the ring of the ranks.

    >>> ring = [Process((0, 0), rank) for rank in (0, 1, 3)]
    >>> [str(holder_of(process, ring)) for process in ring]
    ['0:0 rank 1', '0:0 rank 3', '0:0']
    """
    return processes[(processes.index(process) + 1) % len(processes)]
