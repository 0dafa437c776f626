"""Identities of a run's processes and of their states, and the stages that the processes present can serve."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from swift.schedules.plans.holders import OWN_CUT, BlockHolders
from swift.topology import Topology, Worker


class Process(NamedTuple):
    """A process of a run, through all its restarts: a whole worker, or one of its expert ranks.

    Attributes:
        worker: (pipeline, stage).
        rank: expert rank; 0 if the process has all of them.
    """

    worker: Worker
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker[0]}:{self.worker[1]}" + (f" rank {self.rank}" if self.rank else "")


class Member(NamedTuple):
    """One incarnation of a process; ``incarnation`` grows by one with every restart."""

    process: Process
    incarnation: int


class Stamp(NamedTuple):
    """Identity of a state: states of the same stage with the same stamp are equal, bit for bit.

    After a failure an iteration may be run again by other members, whose sums have another order: that gives another
    state. A newer generation resumes from a state of those before, so stamps are ordered as states are computed.

    Attributes:
        generation: generation that computed or restored it.
        step: last iteration that it contains.
    """

    generation: int
    step: int


class ShardLayout(NamedTuple):
    """The division of a state into slices, one for each rank, in a run whose number of ranks may change.

    Attributes:
        processes: owners of the slices, in the order of their ranks.
        generations: consecutive generations that ran with this layout without losing state.
    """

    processes: tuple[Process, ...]
    generations: tuple[int, ...]


def processes_of(topology: Topology, *, by_rank: bool = False) -> tuple[Process, ...]:
    """Returns all processes of a run, one for each worker or one for each expert rank.

    >>> [str(process) for process in processes_of(Topology(1, 2, 2), by_rank=True)]
    ['0:0', '0:0 rank 1', '0:1', '0:1 rank 1']
    """
    ranks = range(topology.num_expert_ranks if by_rank else 1)
    return tuple(Process(worker, rank) for worker in topology.workers for rank in ranks)


def whole_workers(processes: Collection[Process], present: Collection[Process]) -> frozenset[Worker]:
    """Returns the workers all of whose processes are present."""
    there = frozenset(present)
    return frozenset(worker for worker, _ in processes) - {
        process.worker for process in processes if process not in there
    }


def lost_stages(
    processes: Collection[Process],
    present: Collection[Process],
    *,
    is_elastic: bool = False,
    own_cut: BlockHolders = OWN_CUT,
) -> tuple[int, ...]:
    """Returns the stages without any complete worker; in an elastic run, without any process.

    Where pipelines are cut differently, also the stages that hold a chunk, in whichever pipeline, that no complete
    worker holds.

    >>> lost_stages(processes_of(Topology(2, 2)), [Process((0, 0)), Process((1, 0))])
    (1,)
    >>> lost_stages(processes_of(Topology(1, 1, 2), by_rank=True), [Process((0, 0), rank=1)])
    (0,)
    >>> apart = BlockHolders(((0, 0, 1), (0, 1, 1)))
    >>> lost_stages(processes_of(Topology(2, 2)), [Process((0, 1)), Process((1, 0))], own_cut=apart)
    (0, 1)
    """
    there = {process.worker for process in present} if is_elastic else whole_workers(processes, present)
    lost = {stage for (_, stage), _ in processes} - {stage for _, stage in there}
    for chunk in own_cut.lost_chunks(there):
        lost.update(stages[chunk] for stages in own_cut.stage_of_chunk)
    return tuple(sorted(lost))


def have_all(processes: Collection[Process], there: Collection[Process], cut: BlockHolders = OWN_CUT) -> bool:
    """Returns whether complete workers among the processes that have their parts of a state have all of it.

    Where pipelines are cut differently they need not be of every stage: one may have the chunks of several.

    Args:
        processes: all processes of the run.
        there: those that have their parts.
        cut: workers that hold each chunk in this state.

    >>> processes = processes_of(Topology(2, 2))
    >>> have_all(processes, processes[:2]), have_all(processes, processes[:1])
    (True, False)
    >>> have_all(processes, processes[:1], BlockHolders(((0, 0), (0, 1))))
    True
    """
    whole = whole_workers(processes, there)
    return not cut.lost_chunks(whole) if cut else not lost_stages(processes, there)


def agreed_stamp(
    processes: Collection[Process],
    held_by: Mapping[Process, frozenset[Stamp]],
    cut_of: Callable[[int], BlockHolders] = lambda generation: OWN_CUT,  # noqa: ARG005
) -> Stamp | None:
    """Returns the newest state of which members have all parts; None if there is none.

    Args:
        processes: all processes of the run.
        held_by: states of which each member has its part.
        cut_of: function that returns the workers that hold each chunk in a generation's states.

    >>> processes = processes_of(Topology(2, 2))
    >>> held = [{Stamp(1, 5), Stamp(1, 6)}, {Stamp(1, 5)}, {Stamp(1, 4), Stamp(1, 5)}, {Stamp(0, 9)}]
    >>> agreed_stamp(processes, dict(zip(processes, map(frozenset, held))))
    Stamp(generation=1, step=5)
    """
    for stamp in sorted(frozenset().union(*held_by.values()), reverse=True):
        there = [process for process, held in held_by.items() if stamp in held]
        if have_all(processes, there, cut_of(stamp.generation)):
            return stamp
    return None
