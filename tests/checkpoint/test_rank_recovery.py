"""Lost ranks get every slice back from the best copy that is left, and the losses are counted by slice.

Every number tells what it is of and how old it is, so that what comes back tells where it came from.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.checkpoint.manifest import Ledger
from swift.checkpoint.recovery import RankCopy, recover_ranks
from swift.checkpoint.units import Snapshot, StateSplit, by_name
from swift.errors import RunError
from swift.mesh.per_rank import RANKED, SHARED

LAYERS, CLASSES, WIDTH, NOW = 2, 3, 2, 20
SPECS = {"step": SHARED, "master": RANKED, "moments": RANKED, "placement": SHARED}
IN_SLOTS = 0.5
"""Difference of a replica's numbers from the master's."""


def cut(stages, ranks, step, has_moments=True):
    """A state whose numbers are all different, and are those of a step."""
    shapes = {"head": (stages, 1, ranks, 1, 3), "expert": (stages, LAYERS, ranks, CLASSES, WIDTH)}
    groups, first = [], 0.0
    for dtype in ("float32", "float64") if has_moments else ("float32",):
        group = {}
        for name, shape in shapes.items():
            group[name] = (first + np.arange(np.prod(shape)).reshape(shape) + 10000 * step).astype(dtype)
            first += group[name].size
        groups.append(group)
    moments = {"mu": groups[1]} if has_moments else {}
    placement = np.zeros((stages, LAYERS, ranks, 1), np.int32)
    return {"step": np.full(stages, step, np.int32), "master": groups[0], "moments": moments, "placement": placement}


def slots_of(state):
    """Whole classes in the slots that the placement says, as ``materialize`` joins them."""
    placement = state["placement"]
    stages, _, ranks, num_slots = placement.shape
    expert = np.empty((stages, LAYERS, ranks, num_slots, ranks * WIDTH))
    for stage, row, rank, slot in np.ndindex(placement.shape):
        expert[stage, row, rank, slot] = state["master"]["expert"][
            stage, row, :, placement[stage, row, rank, slot]
        ].ravel()
    head = np.empty((stages, 1, ranks, 1, ranks * 3))
    head[...] = state["master"]["head"].reshape(stages, 1, 1, 1, -1)
    return {"head": head + IN_SLOTS, "expert": expert + IN_SLOTS}


def copy_of(state, split, rank, holder, step, contained_LE, chosen_LK, with_dense=True):
    """Makes the copy of a rank that its neighbour keeps."""
    whole = split.host_snapshot(state, chosen_LK)
    dense = {name: whole.dense[name][:, :, rank : rank + 1] for name in whole.dense if name in split.ranked_names}
    blocks = {dtype: block[:, :, :, rank : rank + 1] for dtype, block in whole.blocks.items()}
    return RankCopy(rank, holder, step, Snapshot(dense if with_dense else {}, blocks, chosen_LK), contained_LE)


def contained(step):
    """Counts updates of every expert, so many a step that no two slices lose the same number."""
    return step * (7 + np.arange(2 * LAYERS * CLASSES).reshape(-1, CLASSES))


def ledger_of(split, saved=None):
    """Makes the ledger after all iterations; ``saved``: step of every expert's newest copy in storage."""
    first = Ledger.first(split.num_layers, split.num_classes, CLASSES)
    updates, saved = contained(NOW)[: split.num_layers], saved or {}
    copies = {unit: (SimpleNamespace(step=step),) for unit, step in saved.items()}
    return replace(first.counted(updates, np.zeros_like(updates)), copies=copies, common=dict.fromkeys(saved.values()))


def plan_of(steps):
    """A checkpoint: of every expert, the step of its copy."""
    sources = {unit: SimpleNamespace(step=step, contained=int(contained(step)[unit])) for unit, step in steps.items()}
    return SimpleNamespace(step=max(steps.values()), sources=sources, passed_over=())


def never():
    raise AssertionError("memory has all")


@st.composite
def losses(draw):
    """Any placement, any lost ranks but all of a stage, any snapshots at any neighbours, a checkpoint or none."""
    stages, ranks = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    state = cut(stages, ranks, NOW)
    shape = (stages, LAYERS, ranks, draw(st.integers(1, 2)))
    classes = draw(st.lists(st.integers(0, CLASSES - 1), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    state["placement"] = np.array(classes, np.int32).reshape(shape)
    places = list(np.ndindex(stages, ranks))
    lost = frozenset(draw(st.sets(st.sampled_from(places), min_size=1, max_size=len(places) - 1)))
    split, copies = StateSplit(state, SPECS, has_classes=True), []
    for step in draw(st.sets(st.sampled_from([5, 12, NOW, NOW + 1]))):
        k = draw(st.integers(1, CLASSES))
        chosen = np.array([draw(st.permutations(range(CLASSES)))[:k] for _ in range(stages * LAYERS)])
        with_dense, of_then = draw(st.booleans()), cut(stages, ranks, step)
        copies += [
            copy_of(of_then, split, rank, (rank + 1) % ranks, step, contained(step), chosen, with_dense)
            for rank in range(ranks)
        ]
    units = list(np.ndindex(stages * LAYERS, CLASSES))
    saved = draw(st.none() | st.lists(st.sampled_from([3, 8, 15]), min_size=len(units), max_size=len(units)))
    slots = slots_of(state) if draw(st.booleans()) else None
    return split, state, slots, lost, copies, saved and dict(zip(units, saved, strict=True))


def best(loss, stage, rank, unit):
    """(step of the weights, step of the moments, in slots), looked for one after the other; None: nowhere."""
    split, state, slots, lost, copies, saved = loss
    has = lambda copy: bool(copy.snapshot.dense) if unit is None else unit[1] in copy.snapshot.chosen_LK[unit[0]]  # noqa: E731
    steps = [
        copy.step
        for copy in copies
        if copy.rank == rank and copy.step <= NOW and (stage, copy.holder) not in lost and has(copy)
    ]
    snapshot = max(steps, default=None)
    if snapshot == NOW:
        return NOW, NOW, False
    living = [other for other in range(split.num_ranks) if (stage, other) not in lost]
    seen = state["placement"][stage, unit[0] % LAYERS, living].ravel() if unit else []
    on_disk = None if saved is None else max(saved.values()) if unit is None else saved[unit]
    older = max((step for step in (on_disk, snapshot) if step is not None), default=None)
    if older is None:
        return None
    if slots is not None and living and (unit is None or unit[1] in seen):
        return NOW, older, True
    return older, older, False


@given(losses())
@settings(max_examples=150, deadline=None)
def test_every_slice_comes_from_the_best_copy_that_is_left(loss):
    split, state, slots, lost, copies, saved = loss
    stages, ranks = split.num_stages, split.num_ranks
    broken, slots = jax.tree.map(np.copy, (state, slots))
    for group in (broken["master"], broken["moments"]["mu"], slots or {}):
        for stage, rank in lost:
            for array in group.values():
                array[stage, :, rank] = np.nan

    def stored():
        if saved is None:
            return None
        whole = cut(stages, ranks, max(saved.values()))
        for (layer, class_), step in saved.items():
            then = cut(stages, ranks, step)
            for mine, theirs in ((whole["master"], then["master"]), (whole["moments"]["mu"], then["moments"]["mu"])):
                at = (*divmod(layer, LAYERS), slice(None), class_)
                mine["expert"][at] = theirs["expert"][at]
        return whole, plan_of(saved)

    parts = [
        (stage, rank, unit)
        for stage, rank in sorted(lost)
        for unit in (None, *((stage * LAYERS + row, class_) for row, class_ in np.ndindex(LAYERS, CLASSES)))
    ]
    wanted = {part: best(loss, *part) for part in parts}
    call = (broken, slots, split, lost, copies, NOW, ledger_of(split, saved), stored)
    if None in wanted.values():
        with pytest.raises(
            RunError, match=r"^rank \d is lost, and no memory and no checkpoint has a copy of its slice of .*$"
        ):
            recover(*call)
        return
    found = recover(*call)
    lost_LE = np.zeros((stages * LAYERS, CLASSES), np.int64)
    expected = {name: leaf.copy() for name, leaf in by_name(state).items()}
    for (stage, rank, unit), (of_weights, of_moments, in_slots) in wanted.items():
        at = (stage, slice(None), rank) if unit is None else (stage, unit[0] % LAYERS, rank, unit[1])
        group = "head" if unit is None else "expert"
        for name, step in ((f"master.{group}", of_weights), (f"moments.mu.{group}", of_moments)):
            expected[name][at] = by_name(cut(stages, ranks, step))[name][at]
        expected[f"master.{group}"][at] += IN_SLOTS * in_slots
        if unit is not None:
            updates = contained(NOW)[unit] - contained(of_weights)[unit]
            lost_LE[unit] += updates
    lost_LE = np.ceil(lost_LE / ranks).astype(int)
    for name, leaf in by_name(found.state).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    before, after = ledger_of(split).tally, found.ledger.tally
    np.testing.assert_array_equal(before.contained_LE - after.contained_LE, lost_LE)
    np.testing.assert_array_equal(after.lost_L, lost_LE.sum(axis=1))
    assert (after.num_faults, found.facts["updates_lost"]) == (1, lost_LE.sum(axis=1).tolist())
    told = {(s["stage"], s["rank"], None) for s in found.facts["sources"] if s["dense"]}
    told |= {(s["stage"], s["rank"], tuple(unit)) for s in found.facts["sources"] for unit in s["experts"]}
    assert told == set(parts)


def recover(state, slots, split, lost, copies, step, ledger, stored):
    return recover_ranks(state, slots, split, lost, copies=copies, step=step, ledger=ledger, stored=stored)


def small(ranks=4, has_moments=True):
    state = cut(1, ranks, NOW, has_moments)
    return state, StateSplit(state, SPECS, has_classes=True)


def all_copies(split, step, rank, holder, chosen=None):
    chosen = np.broadcast_to(np.arange(CLASSES), (LAYERS, CLASSES)) if chosen is None else np.array(chosen)
    return copy_of(cut(1, split.num_ranks, step), split, rank, holder, step, contained(step), chosen)


def test_lines_say_what_came_from_where():
    state, split = small()
    state["placement"][0] = [[[0], [0], [1], [2]], [[1], [0], [2], [0]]]
    stored = lambda: (cut(1, 4, 8), plan_of(dict.fromkeys(np.ndindex(LAYERS, CLASSES), 8)))  # noqa: E731
    found = recover(
        state, slots_of(state), split, [(0, 0), (0, 3)], [all_copies(split, 17, 0, 1, [[0, 1], [0, 1]])], NOW,
        ledger_of(split), stored,
    )  # fmt: skip
    assert found.lines == [
        "rank 0 is lost: weights of dense, experts 0, 1 of layer 0 and expert 0 of layer 1: replicas on ranks 1, 2; "
        "their moments: snapshot of rank 1, 3 steps old",
        "rank 0: expert 2 of layer 0: storage, step 8",
        "rank 0: expert 1 of layer 1: snapshot of rank 1, 3 steps old",
        "rank 0: weights of expert 2 of layer 1: a replica on rank 2; their moments: storage, step 8",
        "rank 3 is lost: weights of dense, experts 0, 1 of layer 0 and experts 0, 2 of layer 1: replicas on ranks 1, "
        "2; their moments: storage, step 8",
        "rank 3: expert 2 of layer 0 and expert 1 of layer 1: storage, step 8",
    ]


def test_a_snapshot_of_this_iteration_has_all_of_a_rank_and_nothing_is_lost():
    state, split = small()
    now = all_copies(split, NOW, 2, 3)
    found = recover(state, slots_of(state), split, [(0, 2)], [now], NOW, ledger_of(split), never)
    assert found.lines == ["rank 2 is lost: dense and experts 0-2: snapshot of rank 3, 0 steps old"]
    assert found.facts["plt"] == 0
    one_older = all_copies(split, NOW - 1, 2, 3)
    found = recover(state, None, split, [(0, 2)], [one_older], NOW, ledger_of(split), never)
    assert found.lines == ["rank 2 is lost: dense and experts 0-2: snapshot of rank 3, 1 step old"]
    assert found.facts["plt"] > 0


def test_an_optimizer_without_moments_needs_replicas_alone():
    state, split = small(has_moments=False)
    state["placement"][0] = [[[0], [1], [2], [2]]] * LAYERS
    found = recover(state, slots_of(state), split, [(0, 3)], [], NOW, ledger_of(split), never)
    assert found.lines == ["rank 3 is lost: dense and experts 0-2: replicas on ranks 0, 1, 2"]
    np.testing.assert_array_equal(
        found.state["master"]["expert"][0, :, 3], state["master"]["expert"][0, :, 3] + IN_SLOTS
    )


def test_what_a_later_fault_finds_has_not_been_lost_twice():
    """The slice that went back contains less from now on; a copy that is newer than that loses nothing."""
    state, split = small()
    back = recover(state, None, split, [(0, 1)], [all_copies(split, 5, 1, 2)], NOW, ledger_of(split), never)
    again = recover(
        back.state, None, split, [(0, 0)], [all_copies(split, NOW, 0, 1)], NOW, back.ledger, never
    )  # fmt: skip
    assert again.ledger.tally.lost_L.tolist() == back.ledger.tally.lost_L.tolist()
    assert again.ledger.tally.num_faults == 2


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_taken_while_it_is_sound():
    state, split = small()
    saved, old = dict.fromkeys(np.ndindex(LAYERS, CLASSES), 19), all_copies(split, 5, 1, 2)

    def restored(stored):
        return recover(state, None, split, [(0, 1)], [old], NOW, ledger_of(split, saved), stored).lines

    def damaged():
        raise RunError("cannot be restored")

    assert restored(lambda: (cut(1, 4, 19), plan_of(saved))) == [
        "rank 1 is lost: dense and experts 0-2: storage, step 19"
    ]
    assert restored(damaged) == ["rank 1 is lost: dense and experts 0-2: snapshot of rank 2, 15 steps old"]


def test_no_more_is_lost_than_there_was():
    """One update of every expert, and three slices of four gone."""
    state, split = small()
    first = Ledger.first(LAYERS, CLASSES, CLASSES)
    one = first.counted(np.ones((LAYERS, CLASSES), int), np.zeros((LAYERS, CLASSES), int))
    copies = [
        replace(all_copies(split, 5, rank, 3), contained_LE=np.zeros((LAYERS, CLASSES), int)) for rank in range(3)
    ]
    found = recover(state, None, split, [(0, 0), (0, 1), (0, 2)], copies, NOW, one, never)
    assert found.ledger.tally.contained_LE.tolist() == [[0] * CLASSES] * LAYERS
    assert found.ledger.tally.plt == 1
