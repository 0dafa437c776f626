"""The checkpointer, without a model or devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from swift.checkpoint import saver
from swift.checkpoint.multi_host_save import HostFailed, InvalidState, Save, SaveNotes
from swift.checkpoint.saver import Draining
from swift.errors import RunError
from swift.train import checkpointer
from swift.train.checkpointer import HostStates, SaverThread
from swift.train.hosts import SINGLE_HOST, Hosts


@pytest.fixture
def directory(tmp_path):
    return SimpleNamespace(check=lambda: None, path=tmp_path, checkpoints_path=tmp_path / "checkpoints")


@pytest.fixture
def thread():
    made = SaverThread()
    yield made
    made.close()


def save(hosts, repeat=lambda write: write(), **dense):
    """Saves a state of some dense arrays."""
    snapshot = SimpleNamespace(
        dense={name.replace("_", "."): np.array(array) for name, array in dense.items()}, blocks={}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "assemble_snapshot", lambda *_: snapshot)
        patch.setattr(checkpointer, "save_checkpoint", lambda *_, **__: "saved")
        return hosts.save(Save(4, ""), None, np.zeros((0, 0)), list, repeat, {})


def test_nothing_is_saved_in_a_directory_that_another_has_taken(directory, thread):
    """A save begins by removing what is half written, which is then the other's."""

    def check():
        raise RunError("no longer belongs to this process")

    directory.check = check
    hosts = HostStates(directory, SINGLE_HOST)
    with pytest.raises(RunError, match="no longer belongs to this process"):
        thread.begin(4, lambda: save(hosts, thread.repeat)).result()
    assert [failure.reason for failure in thread.take_failures()] == ["no longer belongs to this process"]
    assert thread.unsaved == 4, "it is not tried again, and"
    assert hosts.room is not None, "can be kept elsewhere"


def test_weights_that_are_not_finite_are_not_saved_and_what_a_policy_remembers_is(directory, thread):
    """Such as the least load so far, which begins as infinity."""
    hosts = HostStates(directory, SINGLE_HOST)
    assert save(hosts, master_head=[1.0], policy_0=[np.inf]) == "saved"
    with pytest.raises(InvalidState, match="its values are not finite"):
        thread.begin(4, lambda: save(hosts, thread.repeat, master_head=[np.nan], policy_0=[1.0])).result()
    assert thread.unsaved is None
    assert hosts.room is None


def test_a_write_that_fails_is_repeated_until_somebody_waits_for_it(thread, monkeypatch):
    """The first pause is over at once; the second ends when the thread drains, and the next failure is the last."""
    monkeypatch.setattr(saver, "RETRY_PAUSES_S", (0.01, 600.0, 600.0))
    tries = []

    def write():
        tries.append(1)
        raise OSError("full")

    saving = thread.begin(4, lambda: thread.repeat(write))
    failures = []
    while len(failures) < 2:
        failures += thread.take_failures()
    assert not saving.done()
    thread.on(Draining())
    with pytest.raises(OSError, match="full"):
        saving.result(60)
    failures += thread.take_failures()
    assert [failure.reason for failure in failures] == [
        "full; trying again in 0.01 s",
        "full; trying again in 600 s",
        "full",
    ]
    assert len(tries) == 3
    assert thread.begin(5, lambda: thread.repeat(lambda: "saved")).result() == "saved"
    assert thread.unsaved is None


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_host_without_memory_for_its_part_says_so_and_the_first_hears_of_it(tmp_path, directory, capsys, kind):
    mark, first = Save(4, "5f0c"), SaveNotes(tmp_path / "checkpoints", Save(4, "5f0c"), 0)

    def no_memory():
        raise kind("RESOURCE_EXHAUSTED: out of memory\nand more")

    first.post("begun", {})
    host = HostStates(directory, Hosts(2, 1))
    assert host.save(mark, None, np.zeros((0, 0)), no_memory, lambda write: write(), {}) is None
    said = "swift: host 1: its part of the checkpoint of iteration 4 was not written: RESOURCE_EXHAUSTED: out of memory"
    assert capsys.readouterr().err == said + "\n"
    with pytest.raises(HostFailed, match="host 1 has not written its part of iteration 4: RESOURCE_EXHAUSTED"):
        first.read(1, "filled")
