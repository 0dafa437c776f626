"""What the first node of a run and another say to each other: JSON, a line each, over TCP.

Children are named by strings here, as the first node likes; it alone knows what they stand for.
"""

import json
from typing import NamedTuple

from swift.errors import RunError


class Start(NamedTuple):
    """To a node: start a child."""

    who: str
    command: list[str]
    log: str


class Say(NamedTuple):
    """To a node: say a line to a child."""

    who: str
    line: str


class Signal(NamedTuple):
    """To a node: send a signal to a child."""

    who: str
    number: int


class End(NamedTuple):
    """To a node: it is not needed any more.

    Attributes:
        is_finished: whether the run is; else it was stopped, and may go on another time.
    """

    is_finished: bool


class Said(NamedTuple):
    """To the first node: a child has said a line."""

    who: str
    line: str


class Fell(NamedTuple):
    """To the first node: a child has died, after all that it has said."""

    who: str
    why: str


class Pulse(NamedTuple):
    """To either: I am here."""


Message = Start | Say | Signal | End | Said | Fell | Pulse
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Start, Say, Signal, End, Said, Fell, Pulse)}


def message_line(message: Message) -> str:
    """A message as a line.

    >>> message_line(Signal("0:1", 9))
    '["Signal", "0:1", 9]\\n'
    """
    return json.dumps([type(message).__name__, *message]) + "\n"


def read_message(line: str) -> Message:
    """The message of a line; raises RunError where it is none."""
    try:
        kind, *fields = json.loads(line)
        return _KINDS[kind](*fields)
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"a line that no node knows: {line!r}") from error
