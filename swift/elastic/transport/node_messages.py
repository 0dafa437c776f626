"""Messages between the first node of a run and another, over TCP.

Children are named by strings, which only the first node interprets.
"""

from typing import NamedTuple

from swift.elastic.transport.codec import Codec


class StartChild(NamedTuple):
    """Command to a node: start a child."""

    child: str
    command: list[str]
    log: str


class HoldChild(NamedTuple):
    """Command to a node: hold a child ready, see ``Children.hold``."""

    child: str
    command: list[str]
    log: str


class SendToChild(NamedTuple):
    """Command to a node: send a line to a child."""

    child: str
    line: str


class SignalChild(NamedTuple):
    """Command to a node: send a signal to a child."""

    child: str
    number: int


class EndNode(NamedTuple):
    """Command to a node: the run no longer needs it.

    Attributes:
        is_finished: whether the run has finished; otherwise it was stopped, and may be resumed.
    """

    is_finished: bool


class ChildSent(NamedTuple):
    """Report to the first node: a child has sent a line."""

    child: str
    line: str


class ChildDied(NamedTuple):
    """Report to the first node: a child has died; sent after all its lines."""

    child: str
    why: str


class NodeHeartbeat(NamedTuple):
    """Heartbeat, in either direction."""


class NodeUpdate(NamedTuple):
    """Notice on the first node: a node has connected, or is lost."""

    node: int
    is_there: bool


NodeMessage = StartChild | HoldChild | SendToChild | SignalChild | EndNode | ChildSent | ChildDied | NodeHeartbeat

NODE_MESSAGES = Codec[NodeMessage](
    *(StartChild, HoldChild, SendToChild, SignalChild, EndNode),
    *(ChildSent, ChildDied, NodeHeartbeat),
)
NODE_UPDATES = Codec[NodeUpdate](NodeUpdate)
