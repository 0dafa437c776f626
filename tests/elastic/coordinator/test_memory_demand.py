"""A run says how much it keeps in the memory of a node, and where there is room for it, before anything is written."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.elastic.coordinator.memory_demand import MemoryEstimate, choose_storage
from swift.elastic.membership.messages import Process, StateId, processes_of
from swift.elastic.state.slices import copy_shapes
from swift.errors import SettingError
from swift.topology import Topology
from swift.train.saved_state import split_of

GIGABYTE = 10**9
NEED = MemoryEstimate(num_processes=2, states=GIGABYTE, snapshots=0, copies=0)


@pytest.mark.slow
def test_a_demand_is_that_of_the_files(checkpoint_service, ranks, tmp_path):
    """Three states of each rank, four without slots, and copies; a file is little more than its arrays."""
    experiment = replace(
        checkpoint_service.experiment, checkpoint=CheckpointConfig(snapshot_every=1, snapshot_experts_per_layer=1)
    )
    found = MemoryEstimate.of(experiment, ranks, by_rank=True, is_alone=True)
    (file,) = (tmp_path / "keeps").glob(f"0-0-1/state-{StateId(3, 4).generation}-{StateId(3, 4).step}")
    assert found.snapshots / 8 == pytest.approx(file.stat().st_size, rel=0.1)
    assert found.states / 6 > found.snapshots / 8
    split = split_of(checkpoint_service.spec)
    of_all, of_one = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(copy_shapes(split, k))) for k in (4, 1)
    )
    assert found.copies == 2 * (of_all + 5 * of_one)
    assert found.total == found.states + found.snapshots + found.copies


def test_a_node_of_several_keeps_what_its_own_processes_have(two_ranks):
    experiment = replace(two_ranks, topology=Topology(2, 2, 2), checkpoint=CheckpointConfig(every=2))
    processes = processes_of(experiment.topology, by_rank=False)
    one, two = (
        MemoryEstimate.of(experiment, some, by_rank=False, is_alone=False) for some in (processes[:1], processes[:2])
    )
    assert two.states == 2 * one.states
    assert (two.snapshots, two.copies) == (0, 0)
    alone = MemoryEstimate.of(experiment, processes, by_rank=False, is_alone=True)
    saved = alone.snapshots / (2 * 4 + 2 * 2)
    assert 0 < saved < one.states / 3
    assert Process((1, 0)) in processes


def test_where_blocks_move_a_worker_may_have_those_of_others(two_ranks):
    """With one of three stages down, two have three of the six layers each, and not two; with two down, one has six."""
    model = replace(two_ranks.model, num_layers=6, moe_pattern=(True,))
    stays = replace(two_ranks, model=model, topology=Topology(2, 3, 2), num_microbatches=4)
    processes = processes_of(stays.topology, by_rank=False)
    found = [
        MemoryEstimate.of(replace(stays, adapt=adapt), processes, by_rank=False, is_alone=True)
        for adapt in ("reroute", "recut")
    ]
    layers = [
        MemoryEstimate.of(
            replace(stays, model=replace(model, num_layers=3 * n)), processes, by_rank=False, is_alone=True
        )
        for n in (2, 3, 6)
    ]
    assert found[0] == layers[0]
    assert replace(found[1], more_states=0) == layers[1]
    assert found[1].states + found[1].more_states == layers[2].states


@pytest.mark.parametrize(("free", "said"), [(4, r"left\), of 4"), (2, r"left; what does not fit .* disk\), of 2")])
def test_what_is_rarely_needed_is_told_and_no_room_is_kept_for_it(tmp_path, monkeypatch, free, said):
    places = places_of(tmp_path, monkeypatch)
    place, text = choose_storage(
        replace(NEED, more_states=2 * GIGABYTE), places[2], places[0], lambda _: free * GIGABYTE
    )
    assert place == places[0]
    assert re.search(rf"up to 1\.0 GB \(3\.0 GB where blocks move .* {said}", text)


@pytest.mark.parametrize(
    ("free", "chosen", "said"),
    [
        ((64, 1, 1), "memory", "64.0 GB free in"),
        ((0.064, 2, 1), "tmp", r"not in .*/memory \(64\.0 MB free\): that is slower"),
        ((0.064, 0.5, 3), "run", "that is slower"),
    ],
)
def test_the_first_place_with_room_is_taken(tmp_path, monkeypatch, free, chosen, said):
    places = places_of(tmp_path, monkeypatch)
    bytes_free = dict(zip(places, (int(part * GIGABYTE) for part in free), strict=True))
    place, text = choose_storage(NEED, places[2], places[0], bytes_free.__getitem__)
    assert place == tmp_path / chosen
    assert text.startswith("the states of 2 processes take up to 1.0 GB")
    assert re.search(said, text)


def test_where_nothing_has_room_all_places_are_told(tmp_path, monkeypatch):
    places = places_of(tmp_path, monkeypatch)
    with pytest.raises(SettingError, match=r"1\.0 GB, and no directory .* 0\.0 MB in .*/memory, .*/tmp, .*/run"):
        choose_storage(NEED, places[2], places[0], lambda _: 0)


def test_what_dead_runs_have_left_behind_takes_no_room(tmp_path, monkeypatch):
    memory, temporary, run_dir = places_of(tmp_path, monkeypatch)
    for left in (memory / "swift-1-dead", temporary / "swift-2-dead", run_dir / "swift-3-of-another-node"):
        left.mkdir()
        (left / "lock").touch()
        (left / "swift-spill").symlink_to(tmp_path / "swift-gone")
    other = temporary / "swift-project"  # of the user's own
    other.mkdir()
    (other / "lock").touch()

    def free(place):
        return 0 if place == run_dir else GIGABYTE * (64 if not list(place.glob("*-dead")) else 0)

    assert choose_storage(NEED, run_dir, memory, free).path == memory
    assert other.is_dir()
    assert list(run_dir.iterdir())
    assert list(temporary.iterdir()) == [other]


def test_a_run_directory_that_is_not_there_yet_has_the_room_of_its_disk(tmp_path, monkeypatch):
    places = places_of(tmp_path, monkeypatch)
    small = replace(NEED, states=1)
    assert choose_storage(small, tmp_path / "not" / "yet", places[0]).path == places[0]


def places_of(tmp_path, monkeypatch):
    places = [tmp_path / name for name in ("memory", "tmp", "run")]
    for place in places:
        place.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(places[1]))
    return [Path(place) for place in places]
