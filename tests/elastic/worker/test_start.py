"""A member that starts: what it does before it says that it is ready."""

from types import SimpleNamespace

import pytest

from swift.elastic.membership import Ready
from swift.elastic.worker import WorkerProcess


class Reached(Exception):
    """The point up to which a test looks."""


def test_a_member_reads_its_data_up_to_where_the_run_is_before_it_is_ready():
    """Otherwise a generation that it joins would wait while a long stream is skipped."""
    done = []

    def send(kind, **_):
        done.append(kind)
        raise Reached

    member = object.__new__(WorkerProcess)  # without programs
    member._data = SimpleNamespace(skip_to=lambda step: done.append(step)), None
    member._worker_spec, member._channel = SimpleNamespace(), SimpleNamespace(send=send)
    with pytest.raises(Reached):
        member.run(40)
    assert done == [40, Ready]
