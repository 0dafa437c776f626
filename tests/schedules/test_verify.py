"""Every mutation of a valid schedule is found and named; every planner's schedule is valid."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swift.schedules.bounds import lower_bound
from swift.schedules.planners.baselines import one_f_one_b
from swift.schedules.problem import Kind, Op, Problem, TimedOp
from swift.schedules.registry import PLANNERS, with_chunk_shape
from swift.schedules.rules import MAX_LISTED, MAX_OF_A_RULE, ScheduleError, verify, violations
from swift.schedules.schedule import Schedule, peak_memory, period
from swift.topology import Topology

FAULT_FREE = ("gpipe", "one_f_one_b", "zero_bubble")
COLUMNS = ("worker", "kind", "iteration", "pipeline", "microbatch", "chunk", "start", "end")


class Rows:
    """The ops of a schedule, to be changed and put together again."""

    def __init__(self, schedule, data):
        self.problem, self.costs, self.data = schedule.problem, schedule.problem.costs, data
        self.rows = {timed.op: timed for timed in schedule.ops()}
        self.more: list[TimedOp] = []

    def schedule(self):
        return Schedule.from_ops(self.problem, "mutated", [*self.rows.values(), *self.more])

    def any(self, *kinds, where=None):
        """Any op of these kinds for which ``cond_unless_static`` holds."""
        ops = sorted(op for op in self.rows if op.kind in kinds and (where is None or where(op)))
        assume(ops)
        return self.data.draw(st.sampled_from(ops))

    def at(self, op, start):
        """Moves an op in time."""
        timed = self.rows[op]
        self.rows[op] = timed._replace(start=start, end=start + timed.end - timed.start)

    def on(self, op, worker):
        """Moves an op to another worker."""
        self.rows[op] = self.rows[op]._replace(worker=worker)

    def peer_of(self, op):
        """Any other live worker of the op's stage."""
        peers = [(d, op.chunk) for d in self.problem.survivors[op.chunk] if (d, op.chunk) != self.rows[op].worker]
        assume(peers)
        return self.data.draw(st.sampled_from(peers))

    def updates(self, op):
        """The Us of the op's stage and iteration."""
        return [u for u in self.rows if (u.kind, u.iteration, u.chunk) == (Kind.U, op.iteration, op.chunk)]

    def last_end(self):
        return max(timed.end for timed in self.rows.values())


def swap(rows, first, second):
    a, b = rows.rows[first], rows.rows[second]
    rows.at(first, b.start)
    rows.at(second, a.start)


def swap_f_and_b(rows):
    op = rows.any(Kind.F)
    swap(rows, op, op._replace(kind=Kind.B))
    return "before the output of F of micro-batch"


def swap_b_and_w(rows):
    op = rows.any(Kind.B)
    swap(rows, op, op._replace(kind=Kind.W))
    return "before the output of B of micro-batch"


def drop(rows):
    del rows.rows[rows.any(*Kind)]
    return "is missing"


def duplicate_in_place(rows):
    rows.more.append(rows.rows[rows.any(*Kind)])
    return "occurs 2 times"


def duplicate_at_the_end(rows):
    timed, end = rows.rows[rows.any(*Kind)], rows.last_end()
    rows.more.append(timed._replace(start=end, end=end + timed.end - timed.start))
    return "occurs 2 times"


def begin_before_0(rows):
    rows.at(rows.any(Kind.F, where=lambda op: op.chunk == 0), -0.05)
    return "before 0"


def overlap(rows):
    first = rows.any(Kind.W)
    worker, b_end = rows.rows[first].worker, rows.rows[first._replace(kind=Kind.B)].end
    second = rows.any(Kind.F, Kind.B, where=lambda op: rows.rows[op].worker == worker and rows.rows[op].start > b_end)
    rows.at(first, rows.rows[second].start)
    return "on the same worker as"


def ignore_a_message(rows):
    op = rows.any(Kind.F, where=lambda op: op.chunk > 0)
    rows.at(op, rows.rows[op._replace(chunk=op.chunk - 1)].end + rows.costs.t_comm - 0.01)
    return "before the output of F of micro-batch"


def ignore_a_message_back(rows):
    op = rows.any(Kind.B, where=lambda op: op.chunk + 1 < rows.problem.num_stages)
    sender = op._replace(chunk=op.chunk + 1, kind=Kind.B if rows.problem.decoupled else Kind.W)
    start = rows.rows[sender].end + rows.costs.t_comm - 0.01
    rows.at(op, start)
    rows.at(op._replace(kind=Kind.W), start + rows.costs.t_b)
    return f"before the output of {sender.kind.name} of micro-batch"


def move_to_a_dead_worker(rows):
    dead = {p: d for d, p in rows.problem.failed}
    op = rows.any(*Kind, where=lambda op: op.chunk in dead)
    for kind in (Kind.U,) if op.kind == Kind.U else (Kind.F, Kind.B, Kind.W):
        rows.on(op._replace(kind=kind), (dead[op.chunk], op.chunk))
    return "which has failed"


def move_one_kind_to_a_peer(rows):
    op = rows.any(Kind.F, Kind.B, Kind.W)
    rows.on(op, rows.peer_of(op))
    return "on another"


def move_to_another_stage(rows):
    op = rows.any(Kind.F)
    stage = (op.chunk + 1) % rows.problem.num_stages
    assume(stage != op.chunk)
    for kind in (Kind.F, Kind.B, Kind.W):
        rows.on(op._replace(kind=kind), (rows.problem.survivors[stage][0], stage))
    return "not its own"


def move_an_update_to_a_peer(rows):
    op = rows.any(Kind.U)
    rows.on(op, rows.peer_of(op))
    return "not its own"


def begin_before_the_update(rows):
    op = rows.any(Kind.F, where=lambda op: op.iteration > 0)
    update = rows.rows[rows.updates(op._replace(iteration=op.iteration - 1))[0]]
    rows.at(op, update.end - 0.01)
    return "before U of iteration"


def update_after_the_next_begins(rows):
    first = min((rows.rows[op].start, op) for op in rows.rows if op.kind == Kind.F and op.iteration > 0)[1]
    for update in rows.updates(first._replace(iteration=first.iteration - 1)):
        rows.at(update, rows.rows[first].start + 0.01)
    return "before U of iteration"


def update_before_the_last_w(rows):
    op = rows.any(Kind.W)
    for update in rows.updates(op):
        rows.at(update, rows.rows[op].end - 0.01)
    return "before the last W of"


def update_later_than_a_peer(rows):
    op = rows.any(Kind.U, where=lambda op: op.iteration == rows.problem.num_iterations - 1)
    assume(len(rows.updates(op)) > 1)
    rows.at(op, rows.last_end() + 0.01)
    return "that of a peer"


def take_less_time(rows):
    op = rows.any(Kind.F, Kind.B, Kind.W)
    rows.rows[op] = rows.rows[op]._replace(end=rows.rows[op].end - 0.01)
    return "instead of"


def take_more_time(rows):
    op = rows.any(*Kind)
    rows.rows[op] = rows.rows[op]._replace(end=rows.rows[op].end + 0.01)
    return "instead of"


MUTATIONS = [
    swap_f_and_b,
    swap_b_and_w,
    drop,
    duplicate_in_place,
    duplicate_at_the_end,
    begin_before_0,
    overlap,
    ignore_a_message,
    ignore_a_message_back,
    move_to_a_dead_worker,
    move_one_kind_to_a_peer,
    move_to_another_stage,
    move_an_update_to_a_peer,
    begin_before_the_update,
    update_after_the_next_begins,
    update_before_the_last_w,
    update_later_than_a_peer,
    take_less_time,
    take_more_time,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_mutation_is_found_and_named(problems, random_schedule, mutate, data):
    most_failed = 0 if mutate == update_later_than_a_peer else 2
    at_least_2 = st.integers(2, 3)
    problem = data.draw(problems(at_least_2, at_least_2, most_failed, num_iterations=2, memory_limit=None))
    if mutate == move_to_a_dead_worker:
        problem = replace(problem, failed=problem.failed or frozenset({(1, 0)}))
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    verify(schedule)
    rows = Rows(schedule, data)
    verify(rows.schedule())
    fragment = mutate(rows)
    found = violations(rows.schedule())
    assert any(fragment in sentence for sentence in found), (fragment, found)
    with pytest.raises(ScheduleError, match="the schedule of mutated is not valid: "):
        verify(rows.schedule())


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_memory_limit_is_kept_or_broken_as_the_measure_says(problems, random_schedule, data):
    problem = data.draw(problems(memory_limit=None))
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    most = float(peak_memory(schedule).max())
    np.testing.assert_allclose(peak_memory(schedule), slow_peaks(schedule), atol=1e-9)
    least = problem.costs.microbatch_peak
    verify(replace(schedule, problem=replace(problem, memory_limit=max(most, least))))
    assume(0.999 * most >= least)
    over = violations(replace(schedule, problem=replace(problem, memory_limit=0.999 * most)))
    assert over
    assert all("exceeds the memory limit" in sentence for sentence in over)


def slow_peaks(schedule):
    """The memory of every worker at every instant, from the words of the design alone."""
    problem, costs = schedule.problem, schedule.problem.costs
    at = {op: (worker, round(start, 6), round(end, 6)) for op, worker, start, end in schedule.ops()}
    holdings = []
    for op in at:
        if op.kind != Kind.F:
            continue
        (w, f_start, f_end), (_, b_start, b_end), (_, _, w_end) = (
            at[op._replace(kind=kind)] for kind in list(Kind)[:3]
        )
        holdings += [(w, f_start, b_start, costs.f_stash), (w, b_end, w_end, costs.w_stash)]
        holdings.append((w, b_start, b_end, max(costs.f_stash, costs.w_stash)))
        ahead, behind = op._replace(chunk=op.chunk - 1), op._replace(chunk=op.chunk + 1)
        if ahead in at:
            holdings.append((w, at[ahead][2], f_end, costs.inbox))
        if behind in at:
            sent = at[behind._replace(kind=Kind.B if problem.decoupled else Kind.W)][2]
            holdings.append((w, sent, b_end, costs.inbox))
    peaks = np.zeros((problem.num_pipelines, problem.num_stages))
    for worker, instant, _, _ in holdings:
        held = sum(size for w, since, until, size in holdings if w == worker and since <= instant < until)
        peaks[worker] = max(peaks[worker], held)
    return peaks.ravel()


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_decoupled_schedule_is_none_without_decoupling(problems, random_schedule, data):
    problem = data.draw(problems(decoupled=True, memory_limit=None))
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    ops = {op: (start, end) for op, _, start, end in schedule.ops()}
    waits = [start - ops[op._replace(kind=Kind.B)][1] for op, (start, _) in ops.items() if op.kind == Kind.W]
    assume(max(waits) > 0.01)
    found = violations(replace(schedule, problem=replace(problem, decoupled=False)))
    assert any("does not follow its B immediately" in sentence for sentence in found)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_staggered_schedule_is_none_without_staggering(problems, random_schedule, data):
    problem = data.draw(problems(num_stages=st.integers(2, 3), staggered=True, memory_limit=None))
    schedule = random_schedule(problem, data.draw(st.randoms(use_true_random=False)))
    timed = [row for row in schedule.ops() if row.op.iteration == 0]
    last_w = max(end for op, _, _, end in timed if op.kind == Kind.W)
    assume(min(start for op, _, start, _ in timed if op.kind == Kind.U) < last_w - 0.01)
    found = violations(replace(schedule, problem=replace(problem, staggered=False)))
    assert any("before the last W of all stages" in sentence for sentence in found)


# test_milp.py verifies what milp finds, of problems that are small enough for it.
@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "milp"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_planner_gives_valid_schedules(problems, name, data):
    problem = with_chunk_shape(name, data.draw(problems(most_failed=0 if name in FAULT_FREE else 3)))
    schedule = PLANNERS[name](problem)
    verify(schedule)
    flags = {"decoupled": schedule.problem.decoupled, "staggered": schedule.problem.staggered}
    assert schedule.problem == (replace(problem, **flags) if name in FAULT_FREE else problem)
    assert period(schedule) >= lower_bound(schedule.problem) * (1 - 1e-9)


SMALL = one_f_one_b(Problem(Topology(2, 2), 2))


def changed(column, row, value):
    values = getattr(SMALL, column).copy()
    values[row] = value
    return replace(SMALL, **{column: values})


@pytest.mark.parametrize("row", [0, 6, -1], ids=["F", "first U", "last U"])
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [-7, -2, 10, 2**31 - 1])
def test_rows_that_are_no_op_are_named(column, row, value):
    assert violations(changed(column, row, value))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, -1e300])
@pytest.mark.parametrize("column", ["start", "end"])
def test_times_that_are_none_are_named(column, value):
    assert violations(changed(column, 3, value))


def test_an_update_has_no_microbatch():
    assert violations(changed("kind", 6, Kind.U)) == []
    assert "row 6 is not an op of the problem: worker 0, kind 3" in violations(changed("microbatch", 6, 0))[0]


def test_rounding_errors_break_no_rule():
    random = np.random.default_rng(0)
    for _ in range(20):
        jitter = 1e-12 * random.standard_normal((2, SMALL.num_ops))
        rows = zip(SMALL.ops(), SMALL.start + jitter[0], SMALL.end + jitter[1], strict=True)
        problem = replace(SMALL.problem, memory_limit=2)
        verify(Schedule.from_ops(problem, "jitter", [row._replace(start=start, end=end) for row, start, end in rows]))


def test_a_late_op_does_not_make_others_pass():
    """The tolerance is relative to the makespan, but never a part of an op."""
    rows = {timed.op: timed for timed in SMALL.ops()}
    for op in [op for op in rows if (op.kind, op.iteration, op.chunk) == (Kind.U, 2, 1)]:
        rows[op] = rows[op]._replace(start=1e12, end=1e12)
    verify(Schedule.from_ops(SMALL.problem, "late", rows.values()))
    op = Op(Kind.F, 0, 0, 0, 1)
    rows[op] = rows[op]._replace(start=0.0, end=1.0)
    found = violations(Schedule.from_ops(SMALL.problem, "late", rows.values()))
    assert found == [
        "F of micro-batch 0:0 at stage 1, iteration 0 starts at 0, before the output of "
        "F of micro-batch 0:0 at stage 0, iteration 0 arrives at 1"
    ]


def test_malformed_columns_are_named():
    whole = f"is not an array of {SMALL.num_ops} whole numbers"
    assert violations(replace(SMALL, kind=SMALL.kind[:-1])) == [f"column kind {whole}"]
    assert violations(replace(SMALL, chunk=SMALL.chunk.astype(float))) == [f"column chunk {whole}"]
    assert "column end is not an array of" in violations(replace(SMALL, end=SMALL.end.tolist()))[0]
    assert "column start is not an array of" in violations(replace(SMALL, start=SMALL.start.astype("U9")))[0]


def test_no_rows_at_all():
    found = violations(Schedule.from_ops(SMALL.problem, "empty", []))
    assert "F of micro-batch 0:0 at stage 0, iteration 0 is missing" in found
    assert "U of worker 0:0, iteration 0 is missing" in found


@pytest.mark.parametrize("rows", [[1, 0], [-1, 0], [0, 20]], ids=["time", "worker", "iteration"])
def test_rows_out_of_their_worker_s_order_are_named(rows):
    order = np.arange(SMALL.num_ops)
    order[rows] = order[rows[::-1]]
    turned = replace(SMALL, **{name: getattr(SMALL, name)[order] for name in COLUMNS})
    assert any("out of its worker's order" in sentence for sentence in violations(turned))


def test_lists_a_few_of_every_rule_and_20_at_most():
    wrong = replace(SMALL, end=SMALL.end[::-1].copy(), worker=np.zeros_like(SMALL.worker), iteration=SMALL.kind % 3)
    found = violations(wrong)
    assert len(found) == MAX_LISTED
    for fragment in ("not its own", "instead of", "out of its worker's order"):
        assert sum(fragment in sentence for sentence in found) == MAX_OF_A_RULE
    unknown = replace(SMALL, kind=np.full_like(SMALL.kind, 9))
    assert len(violations(unknown)) == MAX_LISTED
