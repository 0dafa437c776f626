"""The first node: where it listens, and its children there and on another node."""

import os
import socket

import pytest

from swift.elastic.transport.children import LocalChildren
from swift.elastic.transport.connections import Rendezvous
from swift.elastic.transport.nodes import MultiNodeChildren
from tests.elastic.transport.nodes import SILENCE_S


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def fleet(listener, tmp_path):
    """Children of this node and of another, whose names begin with 'far'."""
    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)

    def is_first():
        return Rendezvous.find(tmp_path) == meeting

    def place(who):
        return int(who.startswith("far"))

    with (
        meeting.announced(tmp_path),
        MultiNodeChildren(
            LocalChildren(os.environ, tmp_path),
            node_of=place,
            num_nodes=2,
            listener=listener,
            key=meeting.key,
            is_first=is_first,
            silence_s=SILENCE_S,
        ) as fleet,
    ):
        yield fleet
