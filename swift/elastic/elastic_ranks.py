"""Elastic runs: which ones are, and their step specs on any number of expert ranks."""

from collections.abc import Sequence

from swift.elastic.membership.members import Process
from swift.mesh.live import storage_mesh
from swift.pipeline.runtime.step_spec import StepSpec
from swift.train.settings.experiment import Experiment
from swift.train.settings.fewer_ranks import on_ranks


def is_elastic(experiment: Experiment, *, by_rank: bool) -> bool:
    """Returns whether expert ranks continue without lost ones, see ``swift.elastic.membership.shard_ownership``.

    Args:
        experiment: settings of the run.
        by_rank: whether each expert rank has a process.
    """
    is_single_worker = len(experiment.topology.workers) == 1
    return by_rank and is_single_worker and experiment.optimizer.layout == "decoupled"


class ElasticSpecs:
    """The step specs of a run on any number of expert ranks, each on the mesh of a checkpoint.

    Args:
        experiment: settings of the run.
        platform: see ``Experiment.step_spec``.
    """

    def __init__(self, experiment: Experiment, platform: str | None = None):
        self._experiment, self._platform = experiment, platform
        self._by_ranks: dict[int, StepSpec] = {}

    def on(self, num_ranks: int) -> StepSpec:
        """Returns the step spec on ``num_ranks`` ranks, to be put on a live mesh."""
        if num_ranks not in self._by_ranks:
            fewer = on_ranks(self._experiment, num_ranks)
            self._by_ranks[num_ranks] = fewer.step_spec(storage_mesh(fewer.topology), self._platform)
        return self._by_ranks[num_ranks]


def neighbour_of(process: Process, processes: Sequence[Process]) -> Process:
    """Returns the process that keeps copies of a process's slices: the next in the ring of the ranks.

    >>> ring = [Process((0, 0), rank) for rank in (0, 1, 3)]
    >>> [str(neighbour_of(process, ring)) for process in ring]
    ['0:0 rank 1', '0:0 rank 3', '0:0']
    """
    return processes[(processes.index(process) + 1) % len(processes)]
