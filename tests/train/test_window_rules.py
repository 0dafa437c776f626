"""Spans of windows, stages whose state is lost, and lists of failures that are refused before anything has run."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.config.failures import parse_failures
from swift.errors import SettingError
from swift.mesh.live import MeshRow
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings, survives
from swift.schedules.problem import Problem
from swift.topology import Topology
from swift.train.loop import check_failures, lost_stages, window_length

THREE_BY_TWO = Topology(3, 2)
GONE = frozenset({(0, 0), (1, 0)})
MOVED = (MeshRow((0, 1), 0), MeshRow((1, 1), 1), MeshRow((2, 0), 0), MeshRow((2, 1), 1))
"""Roles while ``GONE`` are down: worker 0:1 has left stage 1 for stage 0."""


@given(
    window=st.integers(1, 6),
    last_step=st.integers(1, 40),
    periods=st.lists(st.integers(0, 12), max_size=3),
    breaks=st.sets(st.integers(1, 40)),
)
def test_what_is_due_comes_at_the_end_of_a_program_and_no_window_is_cut_without_need(
    window, last_step, periods, breaks
):
    due = {step for period in periods if period for step in range(period, last_step + 1, period)}
    due |= {step for step in breaks if step < last_step} | {last_step}
    done = 0
    while done < last_step:
        length = window_length(window, done, last_step, periods, breaks)
        inside = due & set(range(done + 1, done + window))
        assert length == (1 if inside else window)
        done += length
    assert done == last_step


def at_home(topology, failed=frozenset()):
    """Every live worker serves its own stage."""
    return [MeshRow(worker, worker[1]) for worker in topology.workers if worker not in failed]


def stages_of(topology):
    """A block for each stage, in all pipelines alike."""
    P = topology.num_stages
    return Chunks((False,) * P, (1,) * P, (tuple(range(P)),) * topology.num_pipelines)


def lost(topology, rows, before, failed):
    return lost_stages(topology, rows, before, failed, stages_of(topology), stages_of(topology))


def test_a_stage_without_a_survivor_is_lost():
    failed = frozenset({(0, 1), (1, 1), (2, 1)})
    assert lost(THREE_BY_TWO, at_home(THREE_BY_TWO), frozenset(), failed) == [1]
    assert lost(THREE_BY_TWO, at_home(THREE_BY_TWO), frozenset(), frozenset(THREE_BY_TWO.workers)) == [0, 1]


def test_a_stage_is_lost_with_its_last_state_though_a_worker_of_its_own_lives_in_another_role():
    assert lost(THREE_BY_TWO, MOVED, GONE, GONE | {(1, 1)}) == []
    assert lost(THREE_BY_TWO, MOVED, GONE, GONE | {(1, 1), (2, 1)}) == [1]


def test_a_stage_is_lost_with_its_last_own_worker_though_a_moved_one_has_its_state():
    assert lost(THREE_BY_TWO, MOVED, GONE, GONE | {(2, 0)}) == [0]


def test_blocks_are_lost_with_the_workers_that_have_taken_them_over():
    """0:0 has the first of four blocks; 1:0, in the place of 0:1, the others; and 0:1, in that of 1:1, the last."""
    topology, down = Topology(2, 2), frozenset({(1, 1)})
    own = Chunks((False,) * 4, (1,) * 4, ((0, 0, 1, 1),) * 2)
    moved = Chunks((False,) * 4, (1,) * 4, ((0, 1, 1, 1), (0, 0, 0, 1)))
    rows = [MeshRow((0, 0), 0), MeshRow((0, 1), 1, pipeline=1), MeshRow((1, 0), 1, pipeline=0)]

    def after(*failed):
        return lost_stages(topology, rows, down, down | set(failed), moved, own)

    assert after((0, 0)) == [0], "1:0 would have the first block only in its own place"
    assert after((0, 1)) == [1]
    assert after((1, 0)) == [0, 1]


def test_a_stage_is_lost_with_its_workers_though_others_hold_its_layers():
    """Cut differently, the first stage of one pipeline and the last one of the other have all four layers."""
    topology, failed = Topology(2, 3), frozenset({(0, 1), (1, 1)})
    own = Chunks((False,) * 4, (1,) * 4, ((0, 1, 2, 2), (0, 0, 1, 2)))
    assert lost_stages(topology, at_home(topology), frozenset(), failed, own, own) == [1]


def test_who_comes_back_has_copied_the_state_before_the_others_fail():
    assert lost(Topology(2), [MeshRow((1, 0), 0)], frozenset({(0, 0)}), frozenset({(1, 0)})) == []
    # Worker 2:1 has copied stage 1 before 0:1 and 1:1 go.
    topology, before = Topology(3, 2), frozenset({(2, 1)})
    assert lost(topology, at_home(topology, before), before, frozenset({(0, 1), (1, 1)})) == []


@st.composite
def failure_sets(draw):
    """A topology, the workers down while every stage was served, and those down next."""
    topology = Topology(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    before, failed = (frozenset(draw(st.sets(st.sampled_from(topology.workers)))) for _ in range(2))
    return topology, before if survives(topology, before) else frozenset(), failed


@given(failure_sets())
def test_where_nobody_moves_a_stage_is_lost_just_when_all_its_workers_are_down(case):
    topology, before, failed = case
    found = lost(topology, at_home(topology, before), before, failed)
    assert found == [
        p for p in range(topology.num_stages) if not {d for d, q in set(topology.workers) - failed if q == p}
    ]


def planner_only(own, problem):
    """All that ``check_failures`` needs of an engine: plans, without a program."""
    live = SimpleNamespace(topology=problem.topology)
    configure = Configurator(PlanSettings(problem)).configure
    return SimpleNamespace(spec=SimpleNamespace(live=live), own_chunks=own, configure=configure)


def test_a_list_that_loses_a_chunk_is_refused():
    """0:0 has the first two of three chunks, 0:1 the last, 1:0 the first, 1:1 the last two."""
    own = Chunks((False,) * 3, (1,) * 3, ((0, 0, 1), (0, 1, 1)))
    engine = planner_only(own, Problem(Topology(2, 2), 2, num_iterations=1, stage_of_chunk=own.stage_DC))
    texts = ["step 2: fail 0:1", "step 5: rejoin 0:1", "step 7: fail 0:0", "step 7: fail 1:1"]
    check_failures(engine, parse_failures(texts[:3], Topology(2, 2), 20), 1)
    with pytest.raises(SettingError, match=r"leave no worker with the state of stage 0 at step 7$"):
        check_failures(engine, parse_failures(texts, Topology(2, 2), 20), 1)
