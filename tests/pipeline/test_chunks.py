"""Pipelines that are cut differently, or run different numbers of micro-batches; workers with several chunks."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.experts.config import RankCapacity, SlotCapacity
from swift.experts.placement.policy import Static
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.configuration import neighbours, survives
from swift.pipeline.reconfigure.recut import Recut
from swift.pipeline.reconfigure.transfer import move_state
from swift.pipeline.step.spec import Rounds
from swift.schedules.plans.normalize import moves_to_spread
from swift.schedules.registry import PLANNERS
from swift.topology import Topology
from swift.train.build import make_engine, make_plan_settings
from tests.case_tiers import tiered
from tests.pipeline.held_rows import rows_of

pytestmark = pytest.mark.usefixtures("x64")

APART = {"topology": (2, 2, 1), "pattern": (False, True, True, False), "cut": ((3, 1), (1, 3))}
MOVING = APART | {"topology": (3, 2, 1), "cut": ((3, 1), (1, 3), (1, 3))}
"""With the first stages of two pipelines gone, the last one of the other moves to a stage of another cut."""
CASES = {
    "micro-batches that differ": {"topology": (2, 2, 1), "counts": (1, 3), "failed": [(0, 1)]},
    "cuts and micro-batches that differ": {**APART, "counts": (3, 1)},
    "two runs": {"topology": (2, 2, 1), "pattern": (True,) * 4, "cut": (1, 1, 1, 1), "held_by": ((0, 1, 1, 0),) * 2},
    "three cuts": {
        "topology": (3, 2, 2),
        "pattern": (False, True, True, True, False),
        "cut": ((3, 2), (2, 3), (4, 1)),
        "counts": (1, 2, 3),
        "failed": [(0, 1)],
        "window": 3,
        "top_k": 2,
    },
    "dense layers, rematerialized": {
        "topology": (2, 2, 2),
        "pattern": (False,) * 5,
        "cut": ((4, 1), (2, 3)),
        "remat": "block",
        "planner": "adaptive",
    },
    "a lost worker, capacity by rank": {
        "topology": (2, 3, 1),
        "pattern": (True,) * 4,
        "cut": ((2, 1, 1), (1, 1, 2)),
        "failed": [(1, 1)],
        "capacity": RankCapacity(0.7),
    },
    "stages in either order": {
        "topology": (2, 2, 1),
        "pattern": (False, True),
        "cut": (1, 1),
        "held_by": ((0, 1), (1, 0)),
    },
    "two runs in either order": {
        "topology": (2, 2, 1),
        "pattern": (True, False, True, True, False),
        "cut": (1, 2, 1, 1),
        "held_by": ((0, 1, 1, 0), (0, 1, 0, 1)),
        "failed": [(0, 1)],
        "counts": (3, 1),
    },
    "a moved role": {**MOVING, "failed": [(1, 0), (2, 0)], "move_roles": True},
}
QUICK = ("two runs",)
"""With messages that stay on their worker."""
LONG = ("cuts and micro-batches that differ",)


@pytest.mark.parametrize("case", tiered(CASES, QUICK, LONG))
def test_every_iteration_is_that_of_the_plain_model(rig, case):
    one = rig(**case)
    for seed in range(3):
        one.check(one.draw(seed))


def test_a_state_goes_block_by_block_to_a_checkpoint_to_survivors_and_back(rig):
    one, failed = rig(**APART), rig(**APART, failed=[(0, 1)])
    state = one.start(one.draw(0))
    first = rows_of(one.spec, state)
    whole = {key: value for mine in first for key, value in mine.items()}
    assert len({value for (path, _), value in whole.items() if "attention" in path and "master" in path}) == 4
    stored, survivors = one.spec.checkpoint_spec, failed.spec
    saved, _ = move_state(state, one.spec, stored)
    assert [row.stage for row in stored.live.rows] == [0, 1]
    assert stored.model_index["attention"].tolist() == [[0, 1, 2], [3, -1, -1]]
    without, num_bytes = move_state(saved, stored, survivors)
    assert num_bytes > 0
    back, _ = move_state(without, survivors, one.spec)
    for spec, moved in ((stored, saved), (survivors, without), (one.spec, back)):
        for mine in rows_of(spec, moved):
            assert all(whole[key] == value for key, value in mine.items())
    assert rows_of(one.spec, back) == first
    kept, num_bytes = move_state(state, one.spec, survivors)
    assert num_bytes == 0
    assert rows_of(survivors, kept) == rows_of(survivors, without)


@dataclass(frozen=True)
class Remembers:
    """A policy with a state of its own for each layer."""

    def init(self, num_layers, num_classes, num_ranks, slots_per_rank):
        placement, _ = Static().init(num_layers, num_classes, num_ranks, slots_per_rank)
        return placement, jnp.zeros((num_layers, num_classes))

    def __call__(self, popularity_LE, placement_LNS, state):
        return placement_LNS, state + popularity_LE


def test_a_policy_with_a_state_for_each_layer_is_refused(rig):
    spec = rig(**APART).spec
    with pytest.raises(SettingError, match="must have no state for each layer"):
        replace(spec, policy=Remembers(), worker_shapes=None)


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted), min_size=1, max_size=6).filter(
        lambda peers_C: {row for rows in peers_C for row in rows} == set(range(1 + max(map(max, peers_C))))
    )
)
def test_in_a_round_every_worker_has_one_chunk_at_most(peers_C):
    num_live = 1 + max(map(max, peers_C))
    holds_HC = np.array([[row in rows for rows in peers_C] for row in range(num_live)])
    rounds = Rounds.of(peers_C, holds_HC, "grouped")
    for chunk, rows in enumerate(peers_C):
        turn = rounds.round_C[chunk]
        assert tuple(rows) in rounds.sums[turn].groups
        assert np.flatnonzero(rounds.chunk_HT[:, turn] == chunk).tolist() == rows
    for peer_sum in rounds.sums:
        assert sorted(row for group in peer_sum.groups for row in group) == list(range(num_live))


def test_a_chunk_without_a_worker_does_not_survive():
    topology, chunks = Topology(2, 2), Chunks((True,) * 4, (1, 2, 1), ((0, 0, 1), (0, 1, 1)))
    assert survives(topology, frozenset({(0, 0), (1, 1)}))
    assert not survives(topology, frozenset({(0, 0), (1, 1)}), chunks)
    assert survives(topology, frozenset({(0, 1), (1, 0)}), chunks)
    near = list(neighbours(topology, frozenset({(0, 0)}), chunks))
    assert near == [frozenset(), frozenset({(0, 0), (0, 1)})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "downs", "moved"),
    [
        ({**APART, "counts": (3, 1), "clip_norm": 0.45}, ((), [(0, 1)], [(1, 0)], ()), (set(), set(), set(), set())),
        (
            {**MOVING, "counts": (3, 1, 2), "clip_norm": 0.28},
            ((), [(0, 1), (1, 1)], [(2, 1)], ()),
            (set(), {0, 1}, {2}, set()),
        ),
    ],
    ids=["stay", "move"],
)
def test_ten_steps_with_failures_and_their_return(rig, fields, downs, moved):
    """Windows, some of them discarded, and single iterations; workers take roles in the pipelines ``moved``."""
    one = rig(**fields)
    drawn, state, start = one.draw(3, num_batches=10), None, 0
    expected, params, placement_PLNS = one.plain(drawn)
    outcomes, problem = [], make_plan_settings(one.experiment, one.spec).problem
    with make_engine(one.experiment, frozenset(), "none") as engine:
        state = one.start(drawn)
        for failed, others, sizes in zip(downs, moved, ((2, 1), (2, 1), (2,), (2,)), strict=True):
            moves = moves_to_spread(replace(problem, failed=frozenset(failed)))
            state, _ = engine.reconfigure(state, frozenset(failed), Recut(moves=moves) if others else None)
            assert {row.pipeline for row in engine.configuration.rows} == {None, *others}
            for size in sizes:
                batches = drawn.batches[start : start + size]
                outcomes.append(engine.start(state, batches, engine.put(batches))())
                state, start = outcomes[-1].state, start + size
        stored = one.spec.checkpoint_spec
        placement = jax.device_get(move_state(state, engine.spec, stored)[0].placement)
    for metrics, iteration in zip([one for done in outcomes for one in done.metrics], expected, strict=True):
        np.testing.assert_allclose(metrics["loss"], iteration.loss, rtol=1e-8)
        np.testing.assert_array_equal(metrics["popularity"], iteration.popularity)
    one.check_params(state, params, 1e-8)
    is_block = stored.model_index["router"] >= 0
    np.testing.assert_array_equal(placement[is_block], placement_PLNS[is_block])
    assert {done.was_discarded for done in outcomes if len(done.metrics) > 1} == {True, False}


@st.composite
def draw_cases(draw):
    """Pipelines cut differently, with other numbers of micro-batches, some workers down; at most 12 devices."""
    shapes = [(D, P, N) for D in range(1, 4) for P in range(1, 4) for N in (1, 2) if D * P >= 2 and D * P * N <= 12]
    D, P, N = draw(st.sampled_from(shapes))
    microbatches = draw(st.integers(1, 3))
    pattern = tuple(draw(st.lists(st.booleans(), min_size=P, max_size=P + 3)))
    counts = [1] * D
    num_more = D * (microbatches - 1)
    for pipeline in draw(st.lists(st.integers(0, D - 1), min_size=num_more, max_size=num_more)):
        counts[pipeline] += 1
    ends = st.permutations(range(1, len(pattern))).map(lambda some: sorted(some[: P - 1]))
    cut = tuple(tuple(np.diff([0, *draw(ends), len(pattern)]).tolist()) for _ in range(D))
    case = {
        "topology": (D, P, N),
        "microbatches": microbatches,
        "counts": tuple(counts),
        "pattern": pattern,
        "cut": cut,
        "window": draw(st.integers(1, 3)),
        "top_k": draw(st.integers(1, 2)),
        "capacity": draw(st.sampled_from([SlotCapacity, RankCapacity]))(draw(st.sampled_from([None, 0.5, 0.8]))),
        "remat": draw(st.sampled_from(["none", "block"])),
        "planner": draw(st.sampled_from([name for name in PLANNERS if name in ("adaptive", "lockstep")])),
    }
    if draw(st.booleans()):  # each worker holds blocks from anywhere in the model
        others = st.lists(st.integers(0, P - 1), min_size=len(pattern) - P, max_size=len(pattern) - P)
        case |= {"cut": (1,) * len(pattern)}
        case |= {"held_by": tuple(tuple(draw(st.permutations([*range(P), *draw(others)]))) for _ in range(D))}
    return case, draw(st.lists(st.sampled_from(Topology(D, P, N).workers), max_size=2, unique=True))


@pytest.mark.slow
@settings(max_examples=16, deadline=None, derandomize=True)
@given(drawn=draw_cases(), seed=st.integers(0, 2**16))
def test_the_law_holds_for_any_cuts(rig, drawn, seed):
    case, down = drawn
    one = rig(**case)
    failed = frozenset()
    for worker in down:
        failed |= {worker} if survives(one.experiment.topology, failed | {worker}, one.spec.chunks) else set()
    assume(one.spec.live.num_live > len(failed))
    one = rig(**case, failed=failed)
    one.check(one.draw(seed))
