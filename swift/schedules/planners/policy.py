"""Policies by which an iteration is listed op by op, and the listings that come of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from swift.schedules.problem import Problem


@dataclass(frozen=True)
class Policy:
    """Policy by which free workers choose their next op.

    Attributes:
        executor: pipeline whose worker runs each x.
        rank: priority of each micro-batch; the lowest is served first. On a worker with several chunks those that are
            further on go first.
        in_flight: target number of micro-batches between F and B for each worker d * P + p. Below it, a waiting F goes
            first, as does a W that frees memory for that F; at or above it, B goes first.
        patience: a W is postponed if a message will arrive before the W has run for this share of its time.
        reserves: whether the first F of a micro-batch on a worker takes the memory for all its chunks there. Otherwise
            it only has to be free at that moment, and other micro-batches may take it: more of them fit, or all of them
            get stuck.
        pace: least time between the starts of two Fs of the first chunk on a worker. The rhythm travels with the
            micro-batches, so that on every worker Fs and Bs arrive in turns, and none waits for an op that began early.
        begins: time before which each worker d * P + p does nothing; empty: all begin at 0. A worker with chunks of
            several stages begins an iteration only after the updates of all of them.
    """

    executor: Sequence[int]
    rank: Sequence[float]
    in_flight: Sequence[float]
    patience: float = 0.0
    reserves: bool = True
    begins: Sequence[float] = ()
    pace: float = 0.0


@dataclass(frozen=True)
class Listing:
    """Schedule of one iteration, as times.

    Attributes:
        start: start of every op 3x + kind.
        end: end of each chunk's last W.
        update: start of each chunk's U.
        spans: times from the first op of each stage, or of each worker that holds several chunks, to its last U.
        period: time after which the next iteration can start in the same way; infinite if memory ran out on the way.
    """

    start: list[float]
    end: list[float]
    update: list[float]
    spans: list[float]
    period: float


def names_of(problem: Problem) -> list[tuple[int, int]]:
    """Lists all micro-batches (pipeline, index), in the order of their numbers."""
    return [(d, m) for d, number in enumerate(problem.microbatches) for m in range(number)]
