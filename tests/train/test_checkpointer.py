"""The checkpointer, without a model or devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from swift.checkpoint.multi_host_save import HostFailed, Save, SaveNotes
from swift.errors import RunError
from swift.train.checkpointer import Attempts, Checkpointer, HostStates
from swift.train.hosts import Hosts


@pytest.fixture
def saver(tmp_path):
    made = Checkpointer.__new__(Checkpointer)
    made._directory = SimpleNamespace(check=lambda: None, path=tmp_path, checkpoints_path=tmp_path / "checkpoints")
    made._attempts = Attempts()
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
    assert saver._attempts.reported() == [], "it is not tried again"
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


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_host_without_memory_for_its_part_says_so_and_the_first_hears_of_it(tmp_path, capsys, kind):
    save, first = Save(4, "5f0c"), SaveNotes(tmp_path / "checkpoints", Save(4, "5f0c"), 0)

    def no_memory():
        raise kind("RESOURCE_EXHAUSTED: out of memory\nand more")

    first.post("begun", {})
    host = HostStates(tmp_path, Hosts(2, 1))
    assert host.save(save, None, np.zeros((0, 0)), no_memory, Attempts(), lambda: None, {}) is None
    said = "swift: host 1: its part of the checkpoint of iteration 4 was not written: RESOURCE_EXHAUSTED: out of memory"
    assert capsys.readouterr().err == said + "\n"
    with pytest.raises(HostFailed, match="host 1 has not written its part of iteration 4: RESOURCE_EXHAUSTED"):
        first.read(1, "filled")
