"""Copies of states that a thread makes while training continues: all processes always have one in common."""

import threading
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from swift.elastic.membership.messages import Process, StateId
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.worker import generation
from swift.elastic.worker.generation import RetainedStates


class GatedStore(SharedMemoryStore):
    """A store that is as slow as a test wants it to be."""

    def __init__(self, directory, pipeline):
        super().__init__(directory, Process((pipeline, 0)))
        self.may_save = threading.Event()
        self.may_save.set()

    def save(self, stamp, tree, records=()):
        assert self.may_save.wait(30)
        super().save(stamp, tree, records)


class Worker:
    """A process that computes one iteration after the other."""

    def __init__(self, directory, pipeline, every, *, base=None):
        self.store = GatedStore(directory, pipeline)
        self.kept = RetainedStates(self.store, every)
        stamp = base or StateId(1, 0)
        if base is not None:
            self.store.save(base, state(base.step))
        self.kept.begin(stamp, state(stamp.step), None)
        self.number, self.done = 1 if base is None else base.generation + 1, stamp.step

    def iterate(self):
        before = max(self.kept.on_devices)
        self.done += 1
        self.kept.records[self.done] = {"step": self.done}
        self.kept.on_devices = {
            before: self.kept.on_devices[before],
            StateId(self.number, self.done): state(self.done),
        }
        self.kept.copy_if_due()

    def settle(self):
        if self.kept._copying is not None:
            self.kept._copying.result(30)

    def steps(self):
        return [step for _, step in sorted(self.store.stamps())]


def state(step):
    return {"weights": np.full(5, step)}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch):
    monkeypatch.setattr(generation, "fetch_shards", lambda tree: tree)


def test_a_state_on_the_devices_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "rebind_to_mesh", lambda *given: given)
    kept, spec = Worker(tmp_path, 0, every=0).kept, SimpleNamespace(live="mesh", specs="specs")  # no shapes are asked
    assert kept.placed(StateId(1, 0), spec, is_there=True) == (kept.on_devices[StateId(1, 0)], "mesh", "specs")


def test_copies_are_made_in_the_first_window_and_when_a_multiple_is_reached_and_two_are_left(tmp_path):
    worker, found = Worker(tmp_path, 0, every=3), []
    for _ in range(10):
        worker.iterate()
        worker.settle()
        found.append(worker.steps())
    assert found == [[1], [1], [1, 3], [1, 3], [1, 3], [1, 3, 6], [3, 6], [3, 6], [3, 6, 9], [6, 9]]
    np.testing.assert_array_equal(
        worker.kept.store.load(StateId(1, 9), state(0), is_own=True)["weights"], np.full(5, 9)
    )
    assert max(worker.store.records()) == 9


def test_a_generation_keeps_the_copy_that_it_began_with_until_all_have_two_later_ones(tmp_path):
    worker = Worker(tmp_path, 0, every=3, base=StateId(4, 6))
    found = []
    for _ in range(4):
        worker.iterate()
        worker.settle()
        found.append(sorted(worker.store.stamps()))
    base, first, later = StateId(4, 6), StateId(5, 7), StateId(5, 9)
    assert found == [[base, first], [base, first], [base, first, later], [first, later]]


def test_training_waits_for_a_copy_when_the_next_one_is_due_and_not_before(tmp_path):
    worker = Worker(tmp_path, 0, every=3)
    worker.store.may_save.clear()
    for _ in range(2):
        worker.iterate()
    assert worker.steps() == []
    third = threading.Thread(target=worker.iterate)
    third.start()
    third.join(0.3)
    assert third.is_alive()
    worker.store.may_save.set()
    third.join(30)
    worker.settle()
    assert worker.steps() == [1, 3]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("base", [None, StateId(4, 6)])
def test_two_processes_have_a_copy_in_common_however_slow_one_of_them_is(tmp_path, every, base):
    """The fast one is one iteration ahead, and has written all its copies; the other's are as late as they can be."""
    fast, slow = (Worker(tmp_path, pipeline, every, base=base) for pipeline in (0, 1))
    for done in count(fast.done + 1):
        if done > 25:
            break
        fast.iterate()
        fast.settle()
        common = fast.store.stamps() & slow.store.stamps()
        if base is not None or done > every + 1:
            assert common, f"when the fast one has done {done}"
            assert max(common).step > done - 1 - 2 * every
        is_due = done == slow.done + 1 and (done % every == 0 or slow.kept._copied[-1:] in ((), (base,)))
        if is_due:
            slow.store.may_save.set()  # it waits for the copy before
            slow.settle()
            slow.store.may_save.clear()
        slow.iterate()


def test_a_copy_for_which_there_is_no_room_is_missing_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def is_full(*_):
        raise OSError("no room")

    worker = Worker(tmp_path, 0, every=2)
    worker.iterate()
    worker.settle()
    monkeypatch.setattr(SharedMemoryStore, "save", is_full)
    worker.iterate()
    worker.settle()
    assert "the state after iteration 2 is not kept: no room" in capsys.readouterr().err
    worker.iterate()
    assert worker.steps() == [1]
    for _ in range(4):  # two more copies find no room
        worker.iterate()
        worker.settle()
    assert worker.steps() == [1]


def test_without_copies_nothing_is_kept_before_the_generation_ends(tmp_path):
    worker = Worker(tmp_path, 0, every=0)
    for _ in range(3):
        worker.iterate()
    assert worker.steps() == []
    worker.kept.keep()
    assert worker.steps() == [2, 3]


def test_the_end_of_a_generation_waits_for_the_copy_and_keeps_what_is_newer(tmp_path):
    worker = Worker(tmp_path, 0, every=4)
    for _ in range(4):
        worker.iterate()
    worker.iterate()
    worker.kept.keep()
    assert worker.steps() == [4, 5]
