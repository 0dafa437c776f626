"""Relocation of blocks to a new layout, and whether it pays off.

``relocate`` decides which worker takes which place, and from which workers it copies blocks. ``MigrationPolicy``
compares the cost of a move with its gain, given how long workers are expected to stay away (``Downtimes``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from swift.errors import SettingError
from swift.schedules.adapt.layouts import BlockLayout, BlockProblem
from swift.topology import Worker

BLOCK_BYTES = 3.5e9
"""Bytes of a block's state in a model with 7e9 parameters: 220e6 parameters, with master weights and moments."""
BANDWIDTH = 12.5e9
"""Bandwidth from one worker to another in each direction, in bytes/s."""


@dataclass(frozen=True)
class Relocation:
    """Moves of workers and blocks from the fault-free layout to another one.

    Attributes:
        place_of: new place of each survivor; idle survivors are left out.
        transfers: (block, sender, receiver) for every block that a worker needs and does not hold yet.
    """

    place_of: Mapping[Worker, Worker]
    transfers: tuple[tuple[int, Worker, Worker], ...]

    @property
    def moved_blocks(self) -> int:
        """Number of blocks to copy."""
        return len(self.transfers)

    def seconds(self, block_bytes: float = BLOCK_BYTES, bandwidth: float = BANDWIDTH) -> float:
        """Returns the time for all copies in seconds: the busiest sender's or receiver's, since copies are parallel.

        Args:
            block_bytes: size of a block's state, in bytes.
            bandwidth: bandwidth of a worker in each direction, in bytes/s.
        """
        number: dict[tuple[str, Worker], int] = {}
        for _, giver, taker in self.transfers:
            for end in (("gives", giver), ("takes", taker)):
                number[end] = number.get(end, 0) + 1
        return max(number.values(), default=0) * block_bytes / bandwidth


def assign_blocks(work: BlockProblem, failed: frozenset[Worker]) -> list[list[Worker]]:
    """Lists the survivors that hold each block, with blocks in the order of ``BlockOrder``.

    Raises:
        SettingError: no survivor holds some block.
    """
    live = work.problem.topology.without(failed)
    workers_by_block: list[list[Worker]] = [[] for _ in work.blocks]
    for worker in live:
        for place in range(*work.runs_P[worker[1]]):
            workers_by_block[place].append(worker)
    for place, workers in enumerate(workers_by_block):
        if not workers:
            stage = next(p for p, (_, end) in enumerate(work.runs_P) if place < end)
            allowed = f"stage {stage} has no live worker: restore from a checkpoint"
            raise SettingError("failed workers", sorted(failed), allowed)
    return workers_by_block


def relocate(work: BlockProblem, layout: BlockLayout, failed: frozenset[Worker]) -> Relocation:
    """Assigns survivors to a layout's places so that as few blocks as possible are copied.

    Raises:
        SettingError: no survivor holds some block.
    """
    # Imported on use: scipy.optimize takes 0.4 s.
    from scipy.optimize import linear_sum_assignment

    holder = assign_blocks(work, failed)
    live, places = work.problem.topology.without(failed), layout.places
    held_W2 = np.array([work.runs_P[p] for _, p in live])
    taken_N2 = np.array(list(places.values()))
    kept_WN = np.minimum(held_W2[:, None, 1], taken_N2[:, 1]) - np.maximum(held_W2[:, None, 0], taken_N2[:, 0])
    stays_WN = np.array([w * work.problem.num_stages + p for w, p in live])[:, None] == np.array(
        [d * work.problem.num_stages + p for d, p in places]
    )
    # The overlap in blocks has weight 2, so that staying in place only breaks ties.
    rows, columns = linear_sum_assignment(2.0 * np.maximum(0, kept_WN) + stays_WN, maximize=True)
    names = list(places)
    place_of = {live[row]: names[column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)}
    gives: dict[Worker, int] = {}
    transfers = []
    for taker, place in place_of.items():
        first, end = work.runs_P[taker[1]]
        for index in range(*places[place]):
            if not first <= index < end:
                giver = min(holder[index], key=lambda worker: (gives.get(worker, 0), worker))
                gives[giver] = gives.get(giver, 0) + 1
                transfers.append((layout.order.blocks[index], giver, taker))
    return Relocation(place_of, tuple(transfers))


@dataclass(frozen=True)
class Downtimes:
    """Expected times until workers return: given by the user, or learned from workers that have returned.

    Attributes:
        told_s: expected time in seconds, given by the user; None for the mean of past downtimes, which is infinite
            before the first one ends.
        down_since: time at which each worker that is down failed, in seconds on any clock.
        seen_s: durations of past downtimes, in seconds.
    """

    told_s: float | None = None
    down_since: Mapping[Worker, float] = field(default_factory=dict)
    seen_s: tuple[float, ...] = ()

    def after(self, failed: frozenset[Worker], time: float) -> "Downtimes":
        """Updates the downtimes: from ``time`` on, exactly the workers in ``failed`` are down."""
        ended = tuple(time - since for worker, since in self.down_since.items() if worker not in failed)
        down = {worker: self.down_since.get(worker, time) for worker in failed}
        return replace(self, down_since=down, seen_s=(*self.seen_s, *ended))

    @property
    def expected_s(self) -> float:
        """Expected time until the next return, in seconds; assumed memoryless, so time already waited has no effect."""
        if self.told_s is not None:
            return self.told_s
        return fmean(self.seen_s) if self.seen_s else float("inf")


@dataclass(frozen=True)
class MigrationPolicy:
    """Policy by which a run decides whether to move blocks to survivors after a failure, until the worker returns.

    Attributes:
        downtimes: past and expected times until workers return.
        is_always: whether to move blocks regardless of the time that moving takes.
        bytes_per_s: speed at which the worker with the most bytes to copy receives them while training waits.
    """

    downtimes: Downtimes = field(default_factory=Downtimes)
    is_always: bool = False
    bytes_per_s: float = BANDWIDTH

    def after(self, failed: frozenset[Worker], time: float) -> "MigrationPolicy":
        """Updates the downtimes: from ``time`` on, exactly the workers in ``failed`` are down."""
        return replace(self, downtimes=self.downtimes.after(failed, time))

    def after_move(self, most_bytes: float, seconds: float) -> "MigrationPolicy":
        """Updates the speed to the one measured in a move.

        Args:
            most_bytes: bytes that the worker with the most bytes to copy received.
            seconds: duration of the move.
        """
        return replace(self, bytes_per_s=most_bytes / seconds) if seconds > 0 else self

    def pays_after_s(self, gain: float, most_bytes: float) -> float:
        """Returns the time in seconds after which moving blocks and moving them back has paid off.

        Args:
            gain: fraction of the duration of a re-routed iteration that the move saves.
            most_bytes: bytes to copy, for the worker that has to copy the most.
        """
        return 2 * most_bytes / self.bytes_per_s / gain

    def is_worth(self, gain: float, most_bytes: float) -> bool:
        """Returns whether moving pays off before the workers are expected to return; see ``pays_after_s``."""
        return self.is_always or self.pays_after_s(gain, most_bytes) < self.downtimes.expected_s
