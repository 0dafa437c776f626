"""Tick tables, run by an interpreter in plain Python that stands in for the SPMD program."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.tick_table import NONE, NOTHING, common_shape, interval_slots
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Costs, Kind, Problem
from swift.topology import Topology

GARBAGE = "what a worker sends that has nothing to say"


class Worker:
    """One row: what it holds, and what it has run."""

    def __init__(self, table, num_chunks, row):
        self.table, self.row, self.last = table, row, num_chunks - 1
        self.slots = {
            "b_stash": [None] * table.num_b_stash,
            "held": [None] * table.num_held,
            "w_stash": [None] * table.num_w_stash,
            "activations": [None] * table.activations.num_slots,
            "gradients": [None] * table.gradients.num_slots,
        }
        self.done = []
        self.is_training = (table.opcode_TR == Kind.B + 1).any()

    def take(self, where, slot):
        value = self.slots[where][slot]
        self.slots[where][slot] = None
        return value

    def put(self, where, slot, value):
        assert slot != NONE
        assert self.slots[where][slot] is None, f"{where} slot {slot} of row {self.row} is alive"
        self.slots[where][slot] = value

    def run(self, tick):
        """Runs the op of a tick, but for U; returns what the worker then sends forwards and backwards."""
        here, table = (tick, self.row), self.table
        if table.opcode_TR[here] in (NOTHING, Kind.U + 1):
            return GARBAGE, GARBAGE
        kind, p = Kind(table.opcode_TR[here] - 1), int(table.chunk_TR[here])
        name = tuple(int(of[here]) for of in (table.iteration_TR, table.pipeline_TR, table.microbatch_TR))
        assert tuple(table.data_Rn[self.row, table.data_TR[here]]) == name
        inbox = table.inbox_TR[here]
        b_slot, held, w_slot = table.b_stash_TR[here], table.held_TR[here], table.w_stash_TR[here]
        self.done.append((kind, *name, p))
        if kind == Kind.F:
            if p > 0:
                assert self.take("activations", inbox) == ("output of F", name, p - 1)
            output = ("output of F", name, p)
            if table.own_slot_TR[here] != NONE:
                self.put("activations", table.own_slot_TR[here], output)
                output = GARBAGE
            if not self.is_training:
                assert b_slot == held == table.loss_TR[here] == NONE
                return output, GARBAGE
            if p == self.last:
                self.put("gradients", table.loss_TR[here], ("gradient of the loss", name))
            self.put("b_stash", b_slot, ("F for B", name, p))
            self.put("held", held, ("F for W", name, p))
            return output, GARBAGE
        if kind == Kind.B:
            gradient = ("output of B", name, p + 1) if p < self.last else ("gradient of the loss", name)
            assert self.take("gradients", inbox) == gradient
            assert self.take("b_stash", b_slot) == ("F for B", name, p)
            assert self.slots["held"][held] == ("F for W", name, p)
            self.put("w_stash", w_slot, ("B", name, p))
            if table.own_slot_TR[here] != NONE:
                self.put("gradients", table.own_slot_TR[here], ("output of B", name, p))
                return GARBAGE, GARBAGE
            return GARBAGE, ("output of B", name, p)
        assert self.take("held", held) == ("F for W", name, p)
        assert self.take("w_stash", w_slot) == ("B", name, p)
        return GARBAGE, GARBAGE

    def update(self, iteration, chunk):
        """Runs the U at the end of a phase; the table has it as the op of the phase's last tick, too."""
        self.done.append((Kind.U, int(iteration), self.table.workers[self.row][0], NONE, int(chunk)))


def interpret(table, num_chunks):
    """Runs a table; returns every row's ops as it ran them, and in which tick."""
    workers = [Worker(table, num_chunks, row) for row in range(len(table.workers))]
    tick_of = {}
    for phase, (first, end) in enumerate(pairwise(table.phase_bounds)):
        for tick in range(first, end):
            sent = [worker.run(tick) for worker in workers]
            for direction, where in enumerate(("activations", "gradients")):
                move([output[direction] for output in sent], getattr(table, where), where, tick, workers)
            busy = [w for w in workers if table.opcode_TR[tick, w.row] not in (NOTHING, Kind.U + 1)]
            tick_of |= {(w.row, w.done[-1]): tick for w in busy}
        updating = [w for w in workers if table.update_HR[phase, w.row] != NONE]
        for worker in updating:
            worker.update(table.update_HR[phase, worker.row], table.update_chunk_HR[phase, worker.row])
            tick_of[worker.row, worker.done[-1]] = end - 1
    assert all(slot is None for worker in workers for slots in worker.slots.values() for slot in slots)
    return [worker.done for worker in workers], tick_of


def move(outputs, moves, where, tick, workers):
    used = moves.permutation_TQ[tick] != NONE
    assert not (~used[:-1] & used[1:]).any(), "rounds without a collective come last"
    for permutation, slots in zip(moves.permutation_TQ[tick], moves.slot_TQR[tick], strict=True):
        came = {} if permutation == NONE else {to: outputs[row] for row, to in moves.permutations[permutation]}
        assert (permutation == NONE) == (slots == NONE).all(), "a collective for nothing"
        for row in np.flatnonzero(slots != NONE):
            assert came[row] is not GARBAGE
            workers[row].put(where, slots[row], came[row])


def check(schedule):
    table, problem = lower(schedule), schedule.problem
    for moves in (table.activations, table.gradients):
        for permutation in moves.permutations:
            for rows in zip(*permutation, strict=True):
                assert len(set(rows)) == len(permutation), "a worker sends or receives twice in one round"
    done, tick_of = interpret(table, problem.num_chunks)
    assert table.workers == problem.live_workers
    check_phases(table, problem)
    for worker, ops in zip(table.workers, done, strict=True):
        assert ops == [tuple(timed.op) for timed in schedule.ops_of(worker)], "each op once, in order"
    updates, last_w, waiting_b = defaultdict(set), defaultdict(int), {}
    for (_, (kind, k, d, m, p)), tick in tick_of.items():
        if kind == Kind.U:
            updates[k, p if problem.staggered or not problem.is_plain else None].add(tick)
        elif kind == Kind.W:
            for key in (
                [(k, p), (k, None)] if problem.staggered else [(k, q) for q in (None, *range(problem.num_chunks))]
            ):
                last_w[key] = max(tick, last_w[key])
            waiting_b[k, d, m, p - 1] = tick
    assert all(len(ticks) == 1 and min(ticks) > last_w[key] for key, ticks in updates.items())
    if not problem.decoupled:
        for (_, (kind, *name)), tick in tick_of.items():
            assert kind != Kind.B or tick > waiting_b.get(tuple(name), -1)
    return table


def check_phases(table, problem):
    """Us are in the last ticks of phases alone, the names of data are distinct, and U needs none."""
    is_u_TR, last_H = table.opcode_TR == Kind.U + 1, table.phase_bounds[1:] - 1
    np.testing.assert_array_equal(np.flatnonzero(is_u_TR.any(axis=1)), last_H)
    np.testing.assert_array_equal(table.update_HR, np.where(is_u_TR, table.iteration_TR, NONE)[last_H])
    assert (table.data_TR[is_u_TR] == NONE).all()
    assert (table.phase_bounds[0], table.phase_bounds[-1]) == (0, table.num_ticks)
    assert table.num_phases <= problem.num_iterations * (
        problem.num_chunks if problem.staggered or not problem.is_plain else 1
    )
    lists = [[tuple(name) for name in names if name[0] != NONE] for names in table.data_Rn.tolist()]
    assert all(len(set(names)) == len(names) for names in lists)
    assert max(map(len, lists)) == table.data_Rn.shape[1]
    for row, names in enumerate(lists):
        forwards = table.data_TR[table.opcode_TR[:, row] == Kind.F + 1, row].tolist()
        assert [names.index(name) for name in names] == list(dict.fromkeys(forwards))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_table_runs_every_op_with_the_right_inputs(problems, random_schedule, data):
    problem = data.draw(problems())
    check(random_schedule(problem, data.draw(st.randoms(use_true_random=False))))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_table_of_chunks_on_any_stages(chunk_problems, random_schedule, data):
    problem = data.draw(chunk_problems())
    check(random_schedule(problem, data.draw(st.randoms(use_true_random=False))))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_table_of_an_adaptive_plan(problems, data):
    check(adaptive(data.draw(problems())))


@pytest.mark.parametrize(("D", "P"), [(2, 2), (2, 4), (3, 4), (4, 4)])
def test_few_permutations(D, P):
    for failed in [frozenset(), *(frozenset([(0, p)]) for p in range(P))]:
        table = lower(adaptive(Problem(Topology(D, P), 2 * P, failed)))
        most = D + 2 if failed else 1
        assert 1 <= len(table.activations.permutations) <= most
        assert 1 <= len(table.gradients.permutations) <= most
        for moves in (table.activations, table.gradients):
            needed = (moves.slot_TQR != NONE).sum(axis=1).max(axis=1).sum()
            assert needed <= moves.num_rounds_T.sum() <= (1.3 if failed else 1) * needed


def test_no_stage_sends_nothing():
    table = check(adaptive(Problem(Topology(2, 1), 3)))
    assert table.activations.permutations == table.gradients.permutations == ()
    assert table.num_rounds_T.sum() == 0


def test_slots_are_as_few_as_what_is_held_at_once():
    schedule = adaptive(Problem(Topology(1, 4), 8, memory_limit=4))
    table = lower(schedule)
    assert table.num_held <= 4
    assert table.num_b_stash + table.num_w_stash <= 2 * 4
    kinds = (Kind.F, Kind.B, table.b_stash_TR), (Kind.F, Kind.W, table.held_TR), (Kind.B, Kind.W, table.w_stash_TR)
    for writer, reader, slots in kinds:
        change = np.cumsum((table.opcode_TR == writer + 1).astype(int) - (table.opcode_TR == reader + 1), axis=0)
        assert change.max() == slots.max() + 1
    counts = [slots.max() + 1 for _, _, slots in kinds]
    assert counts == [table.num_b_stash, table.num_held, table.num_w_stash]


def fits(shape, larger):
    """The permutations may be in another order."""
    sizes = zip(shape._asdict().values(), larger._asdict().values(), strict=True)
    return all(set(own) <= set(other) if isinstance(own, tuple) else own <= other for own, other in sizes)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_padded_table_does_the_same(problems, random_schedule, data):
    random = data.draw(st.randoms(use_true_random=False))
    problem = data.draw(problems(memory_limit=None))
    others = replace(
        problem, num_microbatches=data.draw(st.integers(1, 5)), num_iterations=data.draw(st.integers(1, 3))
    )
    tables = [lower(random_schedule(each, random)) for each in (problem, others)]
    shape = common_shape([table.shape for table in tables])
    for table in tables:
        padded = table.padded(shape)
        assert padded.shape == shape
        assert hash(padded.shape) == hash(shape)
        assert interpret(padded, problem.num_stages) == interpret(table, problem.num_stages)
        assert padded.phase_bounds[-1] == table.num_ticks
        assert (padded.opcode_TR[table.num_ticks :] == NOTHING).all()
        assert padded.num_rounds_T.tolist() == table.num_rounds_T.tolist() + [0] * (shape.num_ticks - table.num_ticks)
        assert table.padded(table.shape).shape == table.shape
    if not fits(tables[0].shape, tables[1].shape):
        with pytest.raises(AssertionError, match="no room"):
            tables[0].padded(tables[1].shape)


def test_tables_of_other_failures_share_a_shape():
    """Their permutations differ; each finds its own among all."""
    problem = Problem(Topology(3, 4), 6)
    tables = [lower(adaptive(replace(problem, failed=frozenset([worker])))) for worker in ((0, 1), (1, 2), (0, 1))]
    assert tables[0].shape == tables[2].shape
    assert tables[0].activations.permutations != tables[1].activations.permutations
    shape = common_shape([tables[1].shape, tables[0].shape])
    for table in tables:
        assert interpret(table.padded(shape), 4) == interpret(table, 4)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_forward_only(problems, random_schedule, data):
    problem = data.draw(problems(memory_limit=None))
    table = lower(random_schedule(problem, data.draw(st.randoms(use_true_random=False))))
    forward = table.forward_only()
    done, _ = interpret(forward, problem.num_stages)
    assert done == [[op for op in ops if op[0] == Kind.F] for ops in interpret(table, problem.num_stages)[0]]
    assert (forward.opcode_TR != NOTHING).any(axis=1).all()
    assert forward.gradients.num_rounds_T.sum() == 0
    assert forward.activations.num_rounds_T.sum() == table.activations.num_rounds_T.sum()
    assert (forward.update_HR == NONE).all()
    assert forward.phase_bounds.tolist() == [0, forward.num_ticks]
    assert forward.padded(common_shape([forward.shape, table.shape])).shape == common_shape(
        [table.shape, forward.shape]
    )


def test_interval_slots():
    rows, since, until = np.array([[0, 0, 3], [0, 1, 2], [0, 2, 4], [1, 0, 9], [0, 2, 3], [0, 4, 5]]).T
    slots = interval_slots(rows, since, until, num_live=2)
    assert slots[3] == 0
    assert sorted(slots[[0, 2, 4]]) == [0, 1, 2]
    assert slots.max() == 2


def test_lockstep_period_by_hand():
    """A single worker waits for none; of two, the last one puts its W off until the other has one."""
    costs = Costs(t_f=1, t_b=2, t_w=4, t_u=8)
    one = adaptive(Problem(Topology(1, 1), 3, costs=costs))
    assert lockstep_period(one) == pytest.approx(3 * 7 + 8)
    two = adaptive(Problem(Topology(1, 2), 1, costs=costs, num_iterations=1))
    assert lockstep_period(two) == pytest.approx(1 + 1 + 2 + 2 + 4 + 8)  # the ticks of F, F, B, B, both Ws, both Us
    talking = replace(two.problem, costs=replace(costs, t_comm=0.5))
    assert lockstep_period(adaptive(talking)) == pytest.approx(18 + 2 * 0.5)  # after the first F and the first B
    alone = replace(one.problem, costs=replace(costs, t_comm=0.5))
    assert lockstep_period(adaptive(alone)) == pytest.approx(3 * 7 + 8)


def test_ticks_of_equal_ops_are_the_schedules_own_times():
    schedule = adaptive(Problem(Topology(3, 4), 6, frozenset([(1, 2)])))
    assert lockstep_period(schedule) == pytest.approx(27)


def test_a_later_tick_for_every_reader():
    schedule = adaptive(Problem(Topology(2, 3), 5, frozenset([(0, 1)]), Costs(1, 1.3, 0.8, 0.5, 0.1)))
    tick_n = assign_ticks(schedule)
    within = schedule.worker[1:] == schedule.worker[:-1]
    assert (np.diff(tick_n)[within] > 0).all()
    f_KDMP, b_KDMP, _ = tick_n[schedule.row_3KDMP]
    assert (f_KDMP[..., 1:] > f_KDMP[..., :-1]).all()
    assert (b_KDMP[..., :-1] > b_KDMP[..., 1:]).all()
