"""The ops of a pipeline schedule."""

from enum import IntEnum
from typing import NamedTuple

from swift.topology import Worker

NO_MICROBATCH = -1


class Kind(IntEnum):
    """Kind of an op: forward, input gradient, weight gradient, update; its value + 1 is a ``TickTable`` opcode."""

    F = 0
    B = 1
    W = 2
    U = 3


class Op(NamedTuple):
    """One op.

    Attributes:
        kind: F, B or W of one micro-batch, or U.
        iteration: index of the iteration, from 0.
        pipeline: pipeline of the micro-batch, wherever it runs; for U, of the worker that updates.
        microbatch: index within the pipeline; ``NO_MICROBATCH`` for U.
        chunk: chunk of the model; without other chunks, the stage of the worker that runs it.
    """

    kind: Kind
    iteration: int
    pipeline: int
    microbatch: int
    chunk: int


class TimedOp(NamedTuple):
    """An op with its worker, start and end."""

    op: Op
    worker: Worker
    start: float
    end: float
