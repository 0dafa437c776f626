"""The checkpoint service reshards a state for other ranks, from states handed over and the best copies."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_path, read_manifest
from swift.checkpoint.reader import plan_restore
from swift.checkpoint.units import by_name
from swift.elastic.membership.messages import Process, ShardLayout, StateId
from swift.elastic.state.slices import ElasticSpecs, Handover, SliceCopies, copy_shapes
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.transport.messages import CommandFailed, Reshard, StateRestored
from swift.mesh.state_rows import fetch_shards, shard_shapes
from swift.train.build import make_step_spec
from swift.train.saved_state import load_state, split_of
from swift.train.start import TrainOptions, begin, read_start

NOW, BEFORE = StateId(3, 4), StateId(3, 2)


def bits(tree):
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(tree))]


def is_parts(tree):
    return isinstance(tree, list)


@pytest.fixture
def whole(checkpoint_service, trained):
    """The state on the device of each rank after four iterations."""
    start = plan_restore(trained / "checkpoints", step=4)
    options = TrainOptions(trained, "", resume=True)
    spec = make_step_spec(checkpoint_service.experiment)
    state = begin(checkpoint_service.experiment, spec, read_start(spec, options, start, None))
    parts = fetch_shards(state)
    return [jax.tree.map(lambda leaf, i=rank: leaf[i : i + 1], parts, is_leaf=is_parts) for rank in (0, 1)]


@pytest.fixture
def elastic(checkpoint_service, ranks, tmp_path):
    """The checkpoint service of a run whose ranks hand over what they have; nobody has handed over anything."""
    (tmp_path / "handed").mkdir()
    for process in ranks:
        SharedMemoryStore(checkpoint_service.snapshots, process).retain_only()
    return replace(checkpoint_service, handed_over=tmp_path / "handed")


@pytest.fixture
def handover(elastic, ranks):
    return Handover(elastic.handed_over, elastic.snapshots, ranks)


def resharded(checkpoint_service, cut, processes, stamp=NOW, generation=5):
    return checkpoint_service.carry_out(Reshard(stamp, ShardLayout(tuple(cut), (3,)), generation, tuple(processes)))


def expected(checkpoint_service, num_ranks):
    """The state after four iterations as so many ranks have it."""
    spec = ElasticSpecs(checkpoint_service.experiment).on(num_ranks)
    plan = plan_restore(checkpoint_service.checkpoints, step=4)
    return spec, load_state(checkpoint_service.checkpoints, plan, spec)


def found(checkpoint_service, process, spec, stamp):
    like = shard_shapes(replace(spec.specs, slots={}), spec.abstract(), 1)
    return SharedMemoryStore(checkpoint_service.snapshots, process).load(stamp, like)


def copy_of(checkpoint_service, part, rank):
    """All of a rank's slices, as its neighbour has them."""
    split, arrays = split_of(checkpoint_service.spec), by_name(part)
    like = copy_shapes(split, split.num_classes)
    everything = np.tile(np.arange(split.num_classes, dtype=np.int32), (split.num_layers, 1))
    taken = {kind: {name: arrays[f"{name}.0"] for name in like[kind]} for kind in ("dense", "experts")}
    assert rank in (0, 1)
    return taken | {"chosen": everything}


def is_as_it_was(checkpoint_service, process):
    spec, state = expected(checkpoint_service, 1)
    return bits(found(checkpoint_service, process, spec, StateId(5, 4))) == bits(state)


def test_fewer_ranks_have_the_same_numbers_and_more_ranks_again(elastic, handover, ranks, whole):
    for process, part in zip(ranks, whole, strict=True):
        handover.states(process).save(NOW, part)
    answer = resharded(elastic, ranks, ranks[1:])
    assert answer == StateRestored(StateId(5, 4), [], answer.facts, is_resharded=True)
    assert (answer.facts["ranks"], answer.facts["ranks_before"]) == (1, 2)
    assert is_as_it_was(elastic, ranks[1])
    # Nobody has taken it up yet: what the process was to continue with is as good as what it has handed over.
    elastic.carry_out(Reshard(StateId(5, 4), ShardLayout(ranks[1:], (5,)), 6, ranks))
    for process, part in zip(ranks, whole, strict=True):
        again = found(elastic, process, elastic.spec, StateId(6, 4))
        assert bits(again.master) == bits(part.master)
        assert bits(again.moments) == bits(part.moments)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_rank_had_is_its_neighbours_copy(elastic, handover, ranks, whole, lost):
    other = ranks[1 - lost]
    handover.states(other).save(NOW, whole[1 - lost])
    handover.copies.store(4, other, ranks[lost]).save(NOW, copy_of(elastic, whole[lost], lost))
    answer = resharded(elastic, ranks, [other])
    assert answer.lines == [
        f"rank {lost} is lost: dense and experts 0-3: snapshot of rank {1 - lost}, 0 steps old",
    ]
    assert answer.facts["lost"] == [str(ranks[lost])]
    assert answer.facts["updates_lost"] == [0, 0]
    assert is_as_it_was(elastic, other)


def test_ranks_are_called_by_their_processes(elastic, handover, whole):
    """Three processes, of which the second was lost before."""
    first, third = Process((0, 0), 0), Process((0, 0), 2)
    handover.states(first).save(NOW, whole[0])
    handover.copies.store(4, first, third).save(NOW, copy_of(elastic, whole[1], 1))
    answer = resharded(elastic, [first, third], [first])
    assert answer.lines == ["rank 2 is lost: dense and experts 0-3: snapshot of rank 0, 0 steps old"]


def test_a_damaged_copy_is_passed_over(elastic, handover, ranks, whole, tmp_path):
    handover.states(ranks[0]).save(NOW, whole[0])
    handover.copies.store(4, *ranks).save(NOW, copy_of(elastic, whole[1], 1))
    (file,) = (tmp_path / "handed" / "copies").glob("*/*/*/state-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    answer = resharded(elastic, ranks, ranks[:1])
    told = "; ".join(answer.lines)
    assert "replica" in told
    assert "storage, step 4" in told
    assert "snapshot" not in told
    assert is_as_it_was(elastic, ranks[0])


def test_what_is_of_another_time_is_not_used(elastic, handover, ranks, whole):
    handover.states(ranks[0]).save(NOW, whole[0])
    handover.copies.store(4, *ranks).save(StateId(2, 4), copy_of(elastic, whole[1], 1))
    assert "snapshot" not in "; ".join(resharded(elastic, ranks, ranks[:1]).lines)


def test_what_is_nowhere_is_told_in_one_line(elastic, handover, ranks, whole, tmp_path):
    handover.states(ranks[0]).save(NOW, whole[0])
    nowhere = replace(elastic, checkpoints=tmp_path / "nowhere" / "checkpoints")
    answer = resharded(nowhere, ranks, ranks[:1])
    assert isinstance(answer, CommandFailed)
    assert answer[:2] == ("reshard", 4)
    assert answer.generation == 5
    assert answer.reason.startswith("rank 1 is lost, and no memory and no checkpoint has ")
    assert len(answer.reason.splitlines()) == 1


def test_what_an_older_copy_costs_is_in_the_next_checkpoint(elastic, handover, ranks, whole):
    """And in its ledger once only."""
    part, copy = replace(whole[0], slots={}), copy_of(elastic, whole[1], 1)
    handover.parts(ranks[0]).save(NOW, part)
    handover.copies.store(4, *ranks).save(BEFORE, copy)
    before = elastic._counts.contained(elastic.spec, 4) - elastic._counts.contained(elastic.spec, 2)
    answer = resharded(elastic, ranks, ranks[:1])
    assert answer.lines == ["rank 1 is lost: dense and experts 0-3: snapshot of rank 0, 2 steps old"]
    lost_L = -(-before // 2).sum(axis=1)
    np.testing.assert_array_equal(answer.facts["updates_lost"], (-(-before // 2)).sum(axis=1))
    assert (lost_L != 0).all()
    elastic.save(StateId(5, 4), ranks[:1])
    manifest = read_manifest(checkpoint_path(elastic.checkpoints, 4), "")
    assert manifest.is_full
    assert manifest.ledger.tally.lost_L.tolist() == answer.facts["updates_lost"]
    assert manifest.ledger.tally.num_faults == 1
    assert not (elastic.snapshots / "losses.json").exists()


def test_a_checkpoint_is_read_on_as_many_ranks_as_there_are(elastic, ranks):
    elastic.load(generation=5, processes=ranks[1:])
    assert is_as_it_was(elastic, ranks[1])


def test_copies_are_found_with_the_states_that_their_holder_has(elastic, handover, ranks, whole, tmp_path):
    (tmp_path / "memory").mkdir()
    mine = SliceCopies(tmp_path / "memory")
    states = SharedMemoryStore(tmp_path / "memory", ranks[0])
    for stamp in (BEFORE, NOW):
        mine.store(4, *ranks).save(stamp, copy_of(elastic, whole[1], 1))
    states.save(NOW, whole[0])
    handover.hand_over(ranks[0], states, mine, lost=[])
    assert handover.find_slices(ranks[0], states.stamps(), 4) == {(ranks[0], NOW)}
    handover.hand_over(ranks[0], states, mine, lost=ranks[1:])
    assert handover.find_slices(ranks[0], states.stamps(), 4) == {(ranks[0], NOW), (ranks[1], NOW)}
    assert handover.find_slices(ranks[0], states.stamps(), 8) == {(ranks[0], NOW)}, "some experts are not in it"
    handover.withdraw(ranks[0], stamps=frozenset())
    assert handover.find_slices(ranks[0], states.stamps(), 4) == frozenset()
