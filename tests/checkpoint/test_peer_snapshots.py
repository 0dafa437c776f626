"""Snapshots in the memory of other ranks: whole or not there, newest and one before, a few experts at a time."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from swift.checkpoint import peer_snapshots
from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.peer_snapshots import PeerSnapshots
from swift.checkpoint.units import StateSplit
from swift.mesh.per_rank import RANKED, SHARED

LAYERS, RANKS, CLASSES = 2, 3, 4
SPECS = {"step": SHARED, "master": RANKED}


def state_of(step):
    """Numbers that tell the step, and which they are."""
    shapes = {"head": (1, 1, RANKS, 1, 2), "expert": (1, LAYERS, RANKS, CLASSES, 2)}
    master = {name: 1000.0 * step + np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    return {"step": np.full(1, step), "master": master}


@pytest.fixture
def device(monkeypatch):
    """A device that copies when it is let: ``go`` is clear while it must not; ``rooms`` is what it was given.

    What begins while it ``fails`` comes to nothing.
    """
    device = SimpleNamespace(go=threading.Event(), rooms=[], fails=False)
    device.go.set()

    def begin(split, state, live, chosen_LK, room):  # noqa: ARG001 - it is the host
        device.rooms.append(room)
        fails = device.fails

        def take():
            assert device.go.wait(60)
            if fails:
                raise MemoryError("no memory")
            return split.host_snapshot(state, chosen_LK)

        return take

    monkeypatch.setattr(peer_snapshots, "begin_snapshot", begin)
    return device


@pytest.fixture
def made(device):  # noqa: ARG001 - which has to continue until they are closed
    """Makes copies, which are closed in the end."""
    found = []

    def make(**config):
        config = CheckpointConfig(snapshot_every=1, **config)
        found.append(PeerSnapshots(StateSplit(state_of(0), SPECS, has_classes=True), config))
        return found[-1]

    yield make
    for one in found:
        one.close()


def contained(step):
    return np.full((LAYERS, CLASSES), step)


def take(copies, step, updates=None):
    copies.begin(state_of(step), None, step, contained(step) if updates is None else updates)


def steps(copies):
    return sorted({copy.step for copy in copies.copies(range(RANKS))})


def test_every_rank_is_with_the_next_one(made):
    copies = made()
    assert copies.is_empty
    take(copies, 5)
    assert not copies.is_empty
    found = copies.copies(range(RANKS))
    assert [(copy.rank, copy.holder, copy.step) for copy in found] == [(0, 1, 5), (1, 2, 5), (2, 0, 5)]
    split, state = StateSplit(state_of(0), SPECS, has_classes=True), state_of(5)
    for copy in found:
        assert list(copy.snapshot.dense) == ["master.head"]
        np.testing.assert_array_equal(
            copy.snapshot.dense["master.head"][:, :, 0], state["master"]["head"][:, :, copy.rank]
        )
        view = split.view(copy.snapshot.blocks, "master.expert")
        of_rank = state["master"]["expert"][:, :, copy.rank]
        np.testing.assert_array_equal(view[:, 0], of_rank.reshape(-1, *of_rank.shape[2:]))


def test_a_snapshot_counts_when_all_of_it_is_there(device, made, monkeypatch):
    copies = made()
    take(copies, 1)
    assert steps(copies) == [1]
    monkeypatch.setattr(peer_snapshots, "PATIENCE_S", 0.05)
    device.go.clear()
    take(copies, 2)
    assert steps(copies) == [1]
    device.go.set()
    take(copies, 3)  # which waits for the second
    assert 2 in steps(copies)


def test_the_newest_and_the_one_before_are_kept_and_what_is_older_is_written_over(device, made):
    copies = made()
    for step in range(1, 6):
        take(copies, step)
        assert steps(copies) == list(range(max(1, step - 1), step + 1))
    assert [room is None for room in device.rooms] == [True, True, True, False, False]
    found = {copy.step: copy.snapshot.dense["master.head"] for copy in copies.copies([1])}
    for step in (4, 5):
        np.testing.assert_array_equal(found[step], state_of(step)["master"]["head"][:, :, 1:2])


@pytest.mark.parametrize("selection", ["sequential", "load_aware"])
def test_the_memory_that_it_takes_does_not_depend_on_who_is_chosen(made, selection):
    """Two whole copies: experts that nobody chooses keep no others."""
    copies, updates = made(snapshot_experts_per_layer=1, selection=selection), contained(0)
    before = sum(block.nbytes for block in copies._store._blocks.values())
    assert before == 2 * LAYERS * CLASSES * RANKS * 2 * 8
    for step in range(1, 60):
        updates = updates + np.array([1000, 100, 10, 1])
        take(copies, step, updates)
    assert sum(block.nbytes for block in copies._store._blocks.values()) == before
    assert len(copies._store.dense) == 2


def test_a_snapshot_that_fails_leaves_what_was_there_and_is_told_once(device, made):
    copies = made()
    take(copies, 1)
    device.fails = True
    assert copies.begin(state_of(2), None, 2, contained(2)) is None
    assert steps(copies) == [1]
    device.fails = False
    assert copies.begin(state_of(3), None, 3, contained(3)) == "no memory"
    assert copies.begin(state_of(4), None, 4, contained(4)) is None
    assert steps(copies) == [3, 4]


def test_one_expert_at_a_time_every_expert_has_its_newest_copy_and_the_one_before(made):
    copies = made(snapshot_experts_per_layer=1)
    for step in range(1, 12):
        take(copies, step)
    of_unit = {}
    for copy in copies.copies(range(RANKS)):
        if copy.rank == 0:
            assert bool(copy.snapshot.dense) == (copy.step >= 10)
            for (layer, class_), _ in copy.snapshot.experts():
                if class_ >= 0:
                    of_unit.setdefault((layer, class_), []).append(copy.step)
    # All of step 1, then round and round; the upper layer is one class ahead.
    assert of_unit == {
        (layer, class_): sorted(
            [step for step in range(2, 12) if (step - 2 + layer) % CLASSES == class_], reverse=True
        )[:2]
        for layer in range(LAYERS)
        for class_ in range(CLASSES)
    }


def test_those_with_most_updates_since_their_last_snapshot(made):
    copies = made(snapshot_experts_per_layer=1, selection="load_aware")
    take(copies, 1)
    for step, favourite in ((2, 3), (3, 1), (4, 3)):
        updates = contained(1).copy()
        updates[:, favourite] += 10 * step
        take(copies, step, updates)
    chosen = {copy.step: copy.snapshot.chosen_LK.ravel().tolist() for copy in copies.copies(range(RANKS))}
    assert chosen == {1: [0, 1, 2] * 2, 2: [3, 3], 3: [1, 1], 4: [3, 3]}
