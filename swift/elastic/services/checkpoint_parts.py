"""The state of a checkpoint in the parts of processes, which they keep in shared memory: joined, and divided again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift.elastic.membership.members import Process, Stamp, have_all, processes_of, whole_workers
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.state.state_shards import join_parts, process_parts
from swift.mesh.live import MeshRow
from swift.mesh.process_shards import shard_shapes
from swift.pipeline.reconfigure.block_transfer import move_on_host
from swift.pipeline.reconfigure.recut import blocks_spec
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.schedules.plans.holders import BlockHolders
from swift.topology import Worker


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """The parts of a generation's processes.

    A process has the blocks that its worker holds. In a checkpoint they are as the first pipeline is cut.

    Attributes:
        spec: step spec of the run, on the mesh of a checkpoint.
        cut: workers that hold each block; False: as in the run.
        snapshots: directory of the parts, see ``SharedMemoryStore``.
        by_rank: whether a process is an expert rank, rather than a whole worker.
        is_elastic: whether the generation has the ranks of one worker that are left, numbered anew.
    """

    spec: StepSpec
    cut: BlockHolders
    snapshots: Path
    by_rank: bool
    is_elastic: bool

    def joined(self, stamp: Stamp, holders: Sequence[Process]) -> TrainState:
        """Joins the parts that processes have kept to the state of a checkpoint, without slots.

        Args:
            stamp: stamp of the state.
            holders: processes of whole workers that together hold every block.

        Raises:
            RunError: a part is damaged or of another state.
            OSError: a part does not exist.
        """
        in_order = self._in_order(holders)
        kept = self._on_workers(process.worker for process in in_order)
        specs, shapes = replace(kept.specs, slots={}), kept.abstract()
        like = shard_shapes(specs, shapes, len(self._ranks(0)))
        parts = [SharedMemoryStore(self.snapshots, process).load(stamp, like) for process in in_order]
        return move_on_host(join_parts(specs, shapes, parts), kept, self.spec.stored)

    def keep(self, host: TrainState, stamp: Stamp, processes: Sequence[Process]) -> None:
        """Keeps every process's part of the state of a checkpoint, without slots; who holds the same gets the same.

        The processes hold what the run's own cut says: a run that goes back to a checkpoint has that.

        Raises:
            OSError: a part cannot be kept.
        """
        worker_of = {self._holding(process): process.worker for process in reversed(processes)}
        rows = sorted(worker_of)
        kept = self._on_workers(worker_of[holding] for holding in rows)
        moved = move_on_host(host, self.spec.stored, kept)
        for nth, process in enumerate(processes):
            ranks = self._ranks(nth if self.is_elastic else process.rank)
            parts = process_parts(replace(kept.specs, slots={}), moved, rows.index(self._holding(process)), ranks)
            SharedMemoryStore(self.snapshots, process).save(stamp, parts)

    def _holding(self, process: Process) -> int:
        return self.spec.chunks.holding(*process.worker)

    def _ranks(self, rank: int) -> Sequence[int]:
        """Returns the expert ranks of a process."""
        return (rank,) if self.by_rank else range(self.spec.live.num_ranks)

    def _on_workers(self, workers: Iterable[Worker]) -> StepSpec:
        """Returns the spec of the state of some workers, a row for each."""
        rows = tuple(MeshRow(worker, worker[1]) for worker in dict.fromkeys(workers))
        return blocks_spec(self.spec.at(replace(self.spec.live, rows=rows)), self.cut)

    def _in_order(self, holders: Sequence[Process]) -> list[Process]:
        """Sorts processes by stage, worker and rank; checks that they are whole workers with all of the state."""
        in_order = sorted(set(holders), key=lambda process: (process.worker[1], process))
        everyone = processes_of(self.spec.live.topology, by_rank=self.by_rank)
        whole, chunks = whole_workers(everyone, in_order), self.spec.chunks
        has_parts = any(process.worker not in whole for process in in_order)
        has_all = have_all(everyone, in_order, self.cut or BlockHolders(() if chunks.are_stages else chunks.stage_DC))
        assert len(in_order) == len(holders), f"holders are {holders}"
        assert self.is_elastic or (has_all and not has_parts), f"holders are {holders}"
        return in_order
