"""What the supervisor and the process that prepares say to each other: JSON, a line each. No JAX here."""

import json
from typing import NamedTuple

from swift.topology import Worker


class CompileRequest(NamedTuple):
    """Be ready for what may come next. It replaces what was not begun yet.

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
        seconds: that it took, on the clock of the wall.
    """

    failed: frozenset[Worker]
    num_ranks: int | None
    kinds: tuple[str, ...]
    compiled: int
    seconds: float


class Alive(NamedTuple):
    """A sign of life: said again and again, also while something is compiled."""


class CompileFailed(NamedTuple):
    """A configuration could not be made ready; those who need it compile for themselves, and may fail."""

    why: str


def wish_line(wish: CompileRequest) -> str:
    """A wish as a line.

    >>> wish_line(CompileRequest(frozenset({(1, 0), (0, 1)})))
    '{"prepare": {"failed": [[0, 1], [1, 0]], "num_ranks": null}}\\n'
    """
    return json.dumps({"prepare": {"failed": sorted(wish.failed), "num_ranks": wish.num_ranks}}) + "\n"


def read_wish(line: str) -> CompileRequest:
    """The wish of a line."""
    said = json.loads(line)["prepare"]
    return CompileRequest(_workers(said["failed"]), said["num_ranks"])


CompileNews = Prepared | CompileFailed | Alive


def said_line(said: CompileNews) -> str:
    """What the process says."""
    if isinstance(said, Alive):
        return json.dumps({"alive": True}) + "\n"
    if isinstance(said, CompileFailed):
        return json.dumps({"trouble": said.why}) + "\n"
    return json.dumps({"prepared": said._asdict() | {"failed": sorted(said.failed)}}) + "\n"


def read_said(line: str) -> CompileNews:
    """What the process has said."""
    said = json.loads(line)
    if "alive" in said:
        return Alive()
    if "trouble" in said:
        return CompileFailed(said["trouble"])
    prepared = said["prepared"]
    workers, kinds = _workers(prepared["failed"]), tuple(prepared["kinds"])
    return Prepared(workers, prepared["num_ranks"], kinds, prepared["compiled"], prepared["seconds"])


def _workers(lists: list[list[int]]) -> frozenset[Worker]:
    return frozenset((pipeline, stage) for pipeline, stage in lists)
