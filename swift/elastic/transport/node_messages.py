"""Messages between the first node of a run and another, over TCP.

Children are named by strings here, as the first node likes; it alone knows what they stand for.
"""

from typing import NamedTuple

from swift.elastic.transport.codec import Codec


class Start(NamedTuple):
    """To a node: start a child."""

    who: str
    command: list[str]
    log: str


class Say(NamedTuple):
    """To a node: send a line to a child."""

    who: str
    line: str


class Signal(NamedTuple):
    """To a node: send a signal to a child."""

    who: str
    number: int


class End(NamedTuple):
    """To a node: it is not needed any more.

    Attributes:
        is_finished: whether the run is; else it was stopped, and may be resumed.
    """

    is_finished: bool


class Said(NamedTuple):
    """To the first node: a child has sent a line."""

    who: str
    line: str


class Fell(NamedTuple):
    """To the first node: a child has died, after all that it has said."""

    who: str
    why: str


class Pulse(NamedTuple):
    """To either: I am here."""


class NodeNews(NamedTuple):
    """On the first node: a node has connected, or is lost."""

    node: int
    is_there: bool


NodeMessage = Start | Say | Signal | End | Said | Fell | Pulse

NODE_MESSAGES = Codec[NodeMessage](Start, Say, Signal, End, Said, Fell, Pulse)
NODE_NEWS = Codec[NodeNews](NodeNews)
