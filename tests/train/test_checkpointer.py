"""The checkpointer, without a model or devices."""

from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from swift.errors import RunError
from swift.train.checkpoints.checkpointer import Checkpointer


@pytest.fixture
def saver(tmp_path):
    made = Checkpointer.__new__(Checkpointer)
    made._directory = SimpleNamespace(check=lambda: None, path=tmp_path, checkpoints_path=tmp_path / "checkpoints")
    made._is_hurried, made._failures = Event(), SimpleQueue()
    return made


def test_nothing_is_saved_in_a_directory_that_another_has_taken(saver):
    """A save begins by removing what is half written, which is then the other's."""

    def check():
        raise RunError("no longer belongs to this process")

    saver._directory.check = check
    snapshot, written = SimpleNamespace(dense={}, blocks={}), []
    with pytest.raises(RunError, match="no longer belongs to this process"):
        saver._save(lambda: snapshot, lambda *_, **__: written.append(1))
    assert written == []
    assert saver._failures.empty(), "it is not tried again"
    assert saver._room is snapshot, "which can be kept elsewhere"


def test_weights_that_are_not_finite_are_not_saved_and_what_a_policy_remembers_is(saver):
    """Such as the least load so far, which begins as infinity."""

    def save(**dense):
        snapshot = SimpleNamespace(
            dense={name.replace("_", "."): np.array(array) for name, array in dense.items()}, blocks={}
        )
        return saver._save(lambda: snapshot, lambda *_, **__: "saved")

    assert save(master_head=[1.0], policy_0=[np.inf]) == "saved"
    with pytest.raises(Exception, match="its values are not finite"):
        save(master_head=[np.nan], policy_0=[1.0])
