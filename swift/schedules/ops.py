"""The ops of a pipeline schedule."""

from enum import IntEnum
from typing import NamedTuple

from swift.topology import Worker

NO_MICROBATCH = -1


class Kind(IntEnum):
    """What a worker does; the values are the opcodes of a ``TickTable`` less one."""

    F = 0
    B = 1
    W = 2
    U = 3


class Op(NamedTuple):
    """One op.

    Attributes:
        kind: F, B or W of one micro-batch, or U.
        iteration: from 0.
        pipeline: of the micro-batch, wherever it runs; for U, of the worker that updates.
        microbatch: index within the pipeline; ``NO_MICROBATCH`` for U.
        stage: of the worker that runs it.
    """

    kind: Kind
    iteration: int
    pipeline: int
    microbatch: int
    stage: int


class TimedOp(NamedTuple):
    """An op, the worker that runs it, and when."""

    op: Op
    worker: Worker
    start: float
    end: float
