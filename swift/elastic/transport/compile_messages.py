"""Messages between the supervisor and the compile service."""

from typing import NamedTuple

from swift.elastic.transport.codec import Codec
from swift.schedules.plans.holders import OWN_CUT, BlockHolders
from swift.topology import Worker


class CompileRequest(NamedTuple):
    """Prepare programs for what may come next; replaces earlier requests that were not begun.

    Attributes:
        failed: failure set.
        num_ranks: number of live expert ranks of an elastic run; None: it does not change.
        cut: workers that hold each block at present; False: as in the run.
        seeks_cut: whether to look for a better cut, too, where the run moves blocks.
    """

    failed: frozenset[Worker]
    num_ranks: int | None = None
    cut: BlockHolders = OWN_CUT
    seeks_cut: bool = True


class Prepared(NamedTuple):
    """The programs of a configuration are in the executable cache.

    Attributes:
        failed: failure set of the configuration.
        num_ranks: its number of expert ranks; None: it does not change.
        kinds: kinds of its programs, see ``Steps``.
        compiled: number of programs that had to be compiled.
        seconds: duration, in seconds.
        before: workers that hold each block until then; False: as in the run.
    """

    failed: frozenset[Worker]
    num_ranks: int | None
    kinds: tuple[str, ...]
    compiled: int
    seconds: float
    before: BlockHolders = OWN_CUT


class CutPrepared(NamedTuple):
    """The programs of a better cut for the survivors of some failures are in the executable cache.

    Attributes:
        failed: failure set.
        cut: workers that hold each block.
        microbatches: micro-batches of each pipeline.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: bytes of state that the worker that gets the most of them has to copy.
        seconds: duration, in seconds.
    """

    failed: frozenset[Worker]
    cut: BlockHolders
    microbatches: tuple[int, ...]
    gain: float
    most_bytes: float
    seconds: float


class Alive(NamedTuple):
    """A heartbeat, sent regularly, also during a compilation."""


class CompileFailed(NamedTuple):
    """The programs of a configuration could not be prepared; processes that need them compile, and may fail, too."""

    why: str


CompileAnswer = Prepared | CutPrepared | CompileFailed | Alive

COMPILE_REQUESTS = Codec[CompileRequest](CompileRequest)
COMPILE_ANSWERS = Codec[CompileAnswer](Prepared, CutPrepared, CompileFailed, Alive)
