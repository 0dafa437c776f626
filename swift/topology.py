"""The shape of a cluster: how many pipelines, stages and expert ranks it has. Does not import JAX."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from swift.errors import SettingError, check_count

Worker = tuple[int, int]
"""A worker (pipeline d, stage p), which fails as a unit."""
RankKind = Literal["emulated", "devices", "virtual"]
RANK_KINDS: tuple[RankKind, ...] = get_args(RankKind)


def read_worker(text: str) -> Worker | None:
    """Parses a worker written as ``pipeline:stage``; returns None if the text does not have this form.

    >>> read_worker("1:2"), read_worker("1-2")
    ((1, 2), None)
    """
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def worker_name(worker: Worker) -> str:
    """Formats a worker as ``d:p``, the notation of settings, events and plans."""
    return f"{worker[0]}:{worker[1]}"


def worker_names(workers: Iterable[Worker]) -> list[str]:
    """Returns workers' names as ``worker_name`` writes them, ordered by pipeline and then by stage.

    >>> worker_names({(1, 2), (0, 3)})
    ['0:3', '1:2']
    """
    return list(map(worker_name, sorted(workers)))


@dataclass(frozen=True)
class Topology:
    """A cluster's shape: worker (d, p) runs stage p of pipeline d on ``num_expert_ranks`` devices.

    (1, 1, N) is SYMI's own setting: N ranks with data parallelism for the dense part and expert parallelism for the
    experts.

    Attributes:
        num_pipelines: number of data-parallel pipelines, D.
        num_stages: number of stages in each pipeline, P.
        num_expert_ranks: number of devices of each worker, over which its experts are spread, N.
    """

    num_pipelines: int = 1
    num_stages: int = 1
    num_expert_ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_pipelines", "num_stages", "num_expert_ranks"):
            check_count(f"Topology.{name}", getattr(self, name), least=1)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, pipeline by pipeline, which is their order on the mesh axis ``worker``."""
        return tuple((d, p) for d in range(self.num_pipelines) for p in range(self.num_stages))

    @property
    def num_devices(self) -> int:
        """Total number of devices, over all workers."""
        return len(self.workers) * self.num_expert_ranks

    def without(self, failed: frozenset[Worker]) -> tuple[Worker, ...]:
        """Lists the workers that have not failed, in mesh order.

        Raises:
            SettingError: ``failed`` names a worker outside the topology.
        """
        for d, p in sorted(failed):
            if not (0 <= d < self.num_pipelines and 0 <= p < self.num_stages):
                allowed = f"no such worker among {self.num_pipelines} pipelines x {self.num_stages} stages"
                raise SettingError("failed worker", worker_name((d, p)), allowed)
        return tuple(worker for worker in self.workers if worker not in failed)

    def live_workers(self, failed: frozenset[Worker] = frozenset()) -> tuple[Worker, ...]:
        """Lists the live workers in mesh order, after checking that every stage has one.

        Raises:
            SettingError: ``failed`` names a worker outside the topology, or leaves a stage without a survivor.
        """
        live = self.without(failed)
        live_stages = {p for _, p in live}
        for stage in range(self.num_stages):
            if stage not in live_stages:
                raise SettingError(
                    "failed workers", sorted(failed), f"stage {stage} has no live worker: restore from a checkpoint"
                )
        return live
