"""Messages between the supervisor and the compile service. No JAX here."""

from typing import NamedTuple

from swift.elastic.transport.codec import Codec
from swift.topology import Worker


class CompileRequest(NamedTuple):
    """A request to prepare for what may come next; it replaces what was not begun yet.

    Attributes:
        failed: the workers that are down.
        num_ranks: the expert ranks that are there, of an elastic run; None: they do not change.
    """

    failed: frozenset[Worker]
    num_ranks: int | None = None


class Prepared(NamedTuple):
    """A configuration is ready: its programs are in the store.

    Attributes:
        failed: the workers that would be down.
        num_ranks: the expert ranks that would be there; None: as many as there always are.
        kinds: of the programs, see ``Steps``.
        compiled: how many programs were missing; 0: all were there.
        seconds: the time that it took.
    """

    failed: frozenset[Worker]
    num_ranks: int | None
    kinds: tuple[str, ...]
    compiled: int
    seconds: float


class Alive(NamedTuple):
    """A sign of life, sent regularly, also while something is compiled."""


class CompileFailed(NamedTuple):
    """A configuration could not be made ready; those who need it compile for themselves, and may fail."""

    why: str


CompileNews = Prepared | CompileFailed | Alive

COMPILE_REQUESTS = Codec[CompileRequest](CompileRequest)
COMPILE_NEWS = Codec[CompileNews](Prepared, CompileFailed, Alive)
