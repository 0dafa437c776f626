"""The plan store: one file for all problems that are planned alike, never trusted, never half-written."""

import errno
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.plans.normalize import VERSION, denormalize, normalize
from swift.schedules.plans.store import CorruptPlanError, PlanStore, decode, encode, plan_key
from swift.schedules.problem import Costs, Problem
from swift.schedules.registry import PLANNERS
from swift.schedules.rules import ScheduleError, verify
from swift.schedules.schedule import Schedule, round_of
from swift.topology import Topology

COLUMNS = ("worker", "kind", "iteration", "pipeline", "microbatch", "chunk", "start", "end")
COSTS = Costs(t_f=0.7, t_b=1.1, t_w=0.9, t_u=0.3, t_comm=0.1)
PROBLEM = Problem(Topology(3, 2), 3, frozenset({(1, 1)}), COSTS, memory_limit=6)
CANONICAL = normalize(PROBLEM).problem

plan = cache(PLANNERS["adaptive"])


def no_planner(problem):
    raise AssertionError(f"planned again: {problem}")


@pytest.fixture
def warned():
    """Warnings of the store."""
    return []


@pytest.fixture
def store(tmp_path, warned):
    return PlanStore(tmp_path / "new" / "plans", warned.append)


def assert_same(schedule, other):
    assert (schedule.problem, schedule.solver) == (other.problem, other.solver)
    for name in COLUMNS:
        assert getattr(schedule, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(schedule, name), getattr(other, name)), name


def test_a_problem_is_planned_once_for_all_failures_with_the_same_counts(store, warned):
    asked = []

    def planner(problem):
        asked.append(problem)
        return plan(problem)

    for pipeline in (1, 0, 2):
        problem = replace(PROBLEM, topology=Topology(3, 2, num_expert_ranks=4), failed=frozenset({(pipeline, 1)}))
        schedule = store.plan(problem, "adaptive", planner)
        assert_same(schedule, denormalize(plan(CANONICAL), normalize(problem)))
        verify(schedule)
    assert asked == [CANONICAL]
    assert not warned
    assert [file.name for file in store.directory.iterdir()] == [f"{plan_key(PROBLEM, 'adaptive')}.json"]


@pytest.mark.parametrize("num_iterations", [1, 2, 5])
@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_plan_is_read_to_the_bit(store, num_iterations, staggered, decoupled):
    problem = replace(CANONICAL, num_iterations=num_iterations, staggered=staggered, decoupled=decoupled)
    assert store.get(problem, "adaptive") is None
    store.put(plan(problem))
    assert_same(store.get(problem, "adaptive"), plan(problem))


def test_a_file_is_json_that_names_what_was_planned(store):
    store.put(plan(CANONICAL))
    content = json.loads(store.path(PROBLEM, "adaptive").read_text())
    assert content["plan"]["solver"] == "adaptive"
    assert content["plan"]["problem"]["failures"] == [0, 1]
    assert content["plan"]["problem"]["costs"]["t_b"] == 1.1
    assert len(content["plan"]["round"]["start_3DMP"]) == 3 * 3 * 3 * 2


COUNTS_AND_SETTINGS = st.tuples(
    st.builds(
        Problem,
        st.builds(Topology, st.integers(2, 3), st.just(2), st.integers(1, 2)),
        st.integers(1, 2),
        st.sampled_from([frozenset(), frozenset({(0, 0)}), frozenset({(1, 0)}), frozenset({(0, 1)})]),
        st.builds(Costs, t_b=st.sampled_from([1.0, 1.1]), t_u=st.sampled_from([0.0, -0.0])),
        st.sampled_from([None, 4, 4.0]),
        st.integers(1, 2),
        st.booleans(),
        st.booleans(),
    ),
    st.sampled_from(["adaptive", "milp"]),
)


@settings(max_examples=200)
@given(COUNTS_AND_SETTINGS, COUNTS_AND_SETTINGS, st.sets(st.sampled_from(fields(Problem)), max_size=2), st.booleans())
def test_keys_are_equal_where_counts_and_settings_are(one, another, differing, same_solver):
    (problem, solver), (other, other_solver) = one, another
    other = replace(problem, **{field.name: getattr(other, field.name) for field in differing})
    other_solver = solver if same_solver else other_solver
    alike = normalize(problem).problem == normalize(other).problem and solver == other_solver
    assert (plan_key(problem, solver) == plan_key(other, other_solver)) == alike


def signed(body):
    """A file's content with whatever body, and the hash that belongs to it."""
    return b'{"sha256": "%b", "plan": %b}\n' % (sha256(body).hexdigest().encode(), body)


def changed(**values):
    """A change of fields of the plan or its round, signed as if the store had written it."""

    def damage(content):
        body = json.loads(content)["plan"]
        for name, value in values.items():
            place = body["round"] if name in body["round"] else body
            place[name] = value(place[name]) if callable(value) else value
        return signed(json.dumps(body).encode())

    return damage


def without(name):
    def damage(content):
        body = json.loads(content)["plan"]
        del (body["round"] if name in body["round"] else body)[name]
        return signed(json.dumps(body).encode())

    return damage


def of_other_problem(_):
    return encode(plan(replace(CANONICAL, num_microbatches=2)))


DAMAGES = {
    "empty": (lambda _: b"", "not a whole plan file"),
    "truncated": (lambda content: content[: len(content) // 2], "not a whole plan file"),
    "cut at its end": (lambda content: content[:-1], "not a whole plan file"),
    "twice": (lambda content: content * 2, "hash"),
    "not JSON": (lambda _: b"\x80PNG plan", "not a whole plan file"),
    "signed, but not JSON": (lambda _: signed(b"[1, 2"), "no valid plan"),
    "signed, but no plan": (lambda _: signed(b"[1, 2]"), "no valid plan"),
    "edited": (lambda content: content.replace(b'"t_b":1.1', b'"t_b":1.2'), "hash"),
    "older version": (changed(version=VERSION - 1), f"version {VERSION - 1}, not {VERSION}"),
    "newer version": (changed(version=VERSION + 1), f"version {VERSION + 1}, not {VERSION}"),
    "other problem": (of_other_problem, "another problem"),
    "other solver": (changed(solver="milp"), "another problem"),
    "no version": (without("version"), "no 'version'"),
    "no round": (without("round"), "no 'round'"),
    "no starts": (without("start_3DMP"), "no 'start_3DMP'"),
    "starts of another shape": (changed(start_3DMP=lambda starts: starts[:-1]), "no valid plan"),
    "nothing at all": (changed(start_3DMP=[], executor_DMP=[]), "from 0 to 2"),
    "starts not finite": (changed(start_3DMP=lambda starts: [float("nan"), *starts[1:]]), "finite"),
    "starts not numbers": (changed(start_3DMP=lambda starts: ["soon", *starts[1:]]), "no valid plan"),
    "executor outside": (changed(executor_DMP=lambda executors: [3, *executors[1:]]), "from 0 to 2"),
    "executor negative": (changed(executor_DMP=lambda executors: [-1, *executors[1:]]), "from 0 to 2"),
    "executor no whole number": (changed(executor_DMP=lambda executors: [0.5, *executors[1:]]), "from 0 to 2"),
    "executor too large": (changed(executor_DMP=lambda executors: [2**70, *executors[1:]]), "from 0 to 2"),
    "executor down": (changed(executor_DMP=lambda executors: [0] * len(executors)), "which has failed"),
    "period too short": (changed(period=lambda period: period / 2), "not valid"),
    "period not finite": (changed(period=float("inf")), "not finite"),
    "no period": (without("period"), "no 'period'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_named_ignored_and_planned_again(store, warned, name):
    damage, reason = DAMAGES[name]
    store.put(plan(CANONICAL))
    path = store.path(PROBLEM, "adaptive")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))

    assert store.get(PROBLEM, "adaptive") is None
    (line,) = warned
    assert line.startswith(f"damaged plan {path} is ignored and planned again: ")
    assert reason in line
    assert "\n" not in line

    schedule = store.plan(PROBLEM, "adaptive", plan)
    assert_same(schedule, denormalize(plan(CANONICAL), normalize(PROBLEM)))
    assert len(warned) == 2
    assert path.read_bytes() == whole
    assert_same(store.plan(PROBLEM, "adaptive", no_planner), schedule)
    assert len(warned) == 2


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_flipped_byte_passes(data):
    content = bytearray(encode(plan(CANONICAL)))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptPlanError):
        decode(bytes(content), CANONICAL, "adaptive")


def test_what_cannot_be_read_is_no_plan_either(store, warned):
    store.path(PROBLEM, "adaptive").mkdir()
    assert store.get(PROBLEM, "adaptive") is None
    assert "directory" in warned[0]


def test_only_valid_plans_that_repeat_are_stored(store):
    made = plan(CANONICAL)
    with pytest.raises(ScheduleError):
        store.put(replace(made, end=made.end + 1))
    with pytest.raises(AssertionError, match="normalized"):
        store.put(store.plan(PROBLEM, "adaptive", plan))
    later = made.iteration == CANONICAL.num_iterations - 1
    with pytest.raises(AssertionError, match="does not repeat"):
        store.put(replace(made, start=made.start + later, end=made.end + later))
    with pytest.raises(AssertionError, match="not be found"):
        store.plan(replace(PROBLEM, num_microbatches=1), "milp", plan)


@pytest.mark.parametrize("first_start", [0.0, 0.1])
def test_a_round_is_what_the_schedule_was_made_from(first_start):
    one = round_of(plan(CANONICAL))
    one = replace(one, start_3DMP=one.start_3DMP + first_start, update_P=one.update_P + first_start)
    again = round_of(Schedule.from_round(CANONICAL, "adaptive", one))
    for name in ("executor_DMP", "start_3DMP", "update_P"):
        assert np.array_equal(getattr(again, name), getattr(one, name))
    assert again.period == pytest.approx(one.period, rel=0 if first_start == 0 else 1e-12, abs=0)


def test_a_write_that_fails_leaves_the_old_plan(store, monkeypatch):
    store.put(plan(CANONICAL))
    whole = store.path(PROBLEM, "adaptive").read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingError, match=rf"plan store = '{store.directory}/.*No space left"):
        store.put(plan(CANONICAL))
    assert store.path(PROBLEM, "adaptive").read_bytes() == whole


def test_two_who_write_the_same_plan_at_once_do_not_meet(store, warned, monkeypatch):
    """The second begins and ends while the first has written its file, but not renamed it."""
    synchronise, nested = os.fsync, []

    def interrupted(file):
        synchronise(file)
        if not nested:
            nested.append(True)
            store.put(plan(CANONICAL))
            assert store.get(CANONICAL, "adaptive") is not None

    monkeypatch.setattr(os, "fsync", interrupted)
    store.put(plan(CANONICAL))
    assert nested
    assert_same(store.get(CANONICAL, "adaptive"), plan(CANONICAL))
    assert not warned
    assert len(list(store.directory.iterdir())) == 1


def test_readers_and_writers_at_once(store, warned):
    problems = [replace(PROBLEM, failed=frozenset({(d, p)})) for d in range(3) for p in range(2)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda problem: store.plan(problem, "adaptive", plan), problems * 4))
    for problem, schedule in zip(problems * 4, made, strict=True):
        assert_same(schedule, denormalize(plan(normalize(problem).problem), normalize(problem)))
    assert not warned
    assert len(list(store.directory.iterdir())) == 2


def test_a_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "plans"):
        with pytest.raises(SettingError, match=f"plan store = '{directory}'"):
            PlanStore(directory)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_refused(store):
    store.directory.chmod(0o500)
    with pytest.raises(SettingError, match=f"plan store = '{store.directory}/"):
        store.plan(PROBLEM, "adaptive", plan)


def test_a_directory_that_has_gone_is_refused(store):
    store.directory.rmdir()
    with pytest.raises(SettingError, match=f"plan store = '{store.directory}/"):
        store.plan(PROBLEM, "adaptive", plan)


def test_python_warns_where_nobody_else_is_told_to(tmp_path):
    store = PlanStore(tmp_path)
    store.path(PROBLEM, "adaptive").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged plan"):
        assert store.get(PROBLEM, "adaptive") is None


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_a_stored_plan_is_valid_for_every_failure_set(D, P, M, data):
    failed = data.draw(st.sets(st.tuples(st.integers(0, D - 2), st.integers(0, P - 1))))
    problem = Problem(Topology(D, P), M, frozenset(failed), COSTS)
    with tempfile.TemporaryDirectory() as directory:
        store = PlanStore(Path(directory))
        made = store.plan(problem, "adaptive", plan)
        verify(made)
        assert_same(store.plan(problem, "adaptive", no_planner), made)


@pytest.mark.slow
def test_a_plan_for_1536_workers_is_a_file_of_a_few_megabytes(store):
    problem = Problem(Topology(24, 64), 64, frozenset({(5, 3), (7, 40)}), COSTS)
    made = store.plan(problem, "adaptive", plan)
    assert store.path(problem, "adaptive").stat().st_size < 8e6
    assert_same(store.plan(problem, "adaptive", no_planner), made)
