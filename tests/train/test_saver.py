"""Who saves checkpoints, without a model or devices."""

from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import pytest

from swift.errors import RunError
from swift.train.saver import Saver


@pytest.fixture
def saver(tmp_path):
    """One whose directory is another process's since the machine woke up."""

    def check():
        raise RunError("is not this process's any more")

    made = Saver.__new__(Saver)
    made._directory = SimpleNamespace(check=check, path=tmp_path, checkpoints_path=tmp_path / "checkpoints")
    made._is_hurried, made._failures = Event(), SimpleQueue()
    return made


def test_nothing_is_saved_in_a_directory_that_another_has_taken(saver):
    """A save begins by removing what is half written, which is then the other's."""
    snapshot, written = SimpleNamespace(dense={}, blocks={}), []
    with pytest.raises(RunError, match="not this process's any more"):
        saver._save(lambda: snapshot, lambda *_, **__: written.append(1))
    assert written == []
    assert saver._failures.empty(), "it is not tried again"
    assert saver._room is snapshot, "which can be kept elsewhere"
