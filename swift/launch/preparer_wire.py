"""What the supervisor and the process that prepares say to each other: JSON, a line each. No JAX here."""

import json
from typing import NamedTuple

from swift.topology import Worker


class Prepared(NamedTuple):
    """A configuration is ready: its programs are in the store.

    Attributes:
        failed: the workers that would be down.
        kinds: of the programs, see ``Steps``.
        compiled: how many programs were missing; 0: all were there.
        seconds: that it took, on the clock of the wall.
    """

    failed: frozenset[Worker]
    kinds: tuple[str, ...]
    compiled: int
    seconds: float


class Trouble(NamedTuple):
    """A configuration could not be made ready; those who need it compile for themselves, and may fail."""

    why: str


def wish_line(failed: frozenset[Worker]) -> str:
    """To the process: be ready for what may come while these workers are down. It replaces what was not begun yet.

    >>> wish_line(frozenset({(1, 0), (0, 1)}))
    '{"prepare": {"failed": [[0, 1], [1, 0]]}}\\n'
    """
    return json.dumps({"prepare": {"failed": sorted(failed)}}) + "\n"


def read_wish(line: str) -> frozenset[Worker]:
    """The failed workers of a wish."""
    return _workers(json.loads(line)["prepare"]["failed"])


def said_line(said: Prepared | Trouble) -> str:
    """What the process says."""
    if isinstance(said, Trouble):
        return json.dumps({"trouble": said.why}) + "\n"
    return json.dumps({"prepared": said._asdict() | {"failed": sorted(said.failed)}}) + "\n"


def read_said(line: str) -> Prepared | Trouble:
    """What the process has said."""
    said = json.loads(line)
    if "trouble" in said:
        return Trouble(said["trouble"])
    prepared = said["prepared"]
    workers, kinds = _workers(prepared["failed"]), tuple(prepared["kinds"])
    return Prepared(workers, kinds, prepared["compiled"], prepared["seconds"])


def _workers(lists: list[list[int]]) -> frozenset[Worker]:
    return frozenset((pipeline, stage) for pipeline, stage in lists)
