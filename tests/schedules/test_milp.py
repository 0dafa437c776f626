"""The exact planner against known optima, all sequences of tiny problems, and ``adaptive``."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import tight_bound
from swift.schedules.milp import proof as milp_module
from swift.schedules.milp.proof import Proof, milp, milp_proof
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import Schedule, peak_memory, period
from swift.schedules.sequences import time_round
from swift.topology import Topology

WHOLE = st.sampled_from([1.0, 2.0, 3.0])
WHOLE_OR_NONE = st.sampled_from([0.0, 1.0, 2.0])
SIZES = st.sampled_from([0.5, 1.0, 2.0])
COSTS = st.just(Costs()) | st.builds(
    Costs, WHOLE, WHOLE, WHOLE, WHOLE_OR_NONE, WHOLE_OR_NONE, SIZES, SIZES | st.just(0.0)
)
UP_TO_3 = st.integers(1, 3)
TENTHS = Costs(1.0, 1.3, 0.8, 0.0, 0.1)
UNEVEN = Costs(1.0, 1.3718, 0.8123, 0.5541, 0.1311)
GAP = Problem(Topology(3, 4), 4, frozenset({(0, 2)}), memory_limit=4.0)  # 20, where tight_bound says 19


def one_after_the_other(problem):
    """A schedule within any memory limit, with no two ops at a time: a long way from the optimum."""
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    executor_DMP = np.empty((D, M, P), np.int32)
    executor_DMP[:] = [peers[0] for peers in problem.survivors]
    order = [(kind, d, m) for d in range(D) for m in range(M) for kind in (Kind.F, Kind.B, Kind.W)]
    sequences = [order if problem.survivors[p][0] == d else [] for d in range(D) for p in range(P)]
    return Schedule.from_round(problem, "one after the other", time_round(problem, executor_DMP, sequences))


@pytest.fixture
def no_help(monkeypatch):
    """The MILP has to find every schedule and to prove every bound itself."""
    monkeypatch.setattr(milp_module, "adaptive", one_after_the_other)
    return lambda problem, time_limit_s=60.0: milp_proof(problem, time_limit_s, use_bound=False)


# Found by CP-SAT with micro-batches as intervals, times in whole units.
KNOWN = [
    (1, 2, 2, None, 2, 7),
    (1, 2, 4, None, 2, 13),
    (1, 2, 4, None, 3, 12),
    (2, 2, 2, 0, 2, 13),
    (2, 2, 2, 0, 3, 12),
    (2, 2, 2, 1, 2, 13),
    (2, 2, 2, 1, 3, 12),
    (3, 2, 2, 0, 2, 10),
    (3, 2, 2, 1, 2, 10),
    (2, 2, 4, 0, 2, 25),
    (1, 4, 4, None, 4, 15),
]


@pytest.mark.parametrize(("D", "P", "M", "stage", "limit", "optimum"), KNOWN)
def test_known_optima(no_help, D, P, M, stage, limit, optimum):
    failed = frozenset() if stage is None else frozenset({(0, stage)})
    proof = no_help(Problem(Topology(D, P), M, failed, memory_limit=limit))
    assert proof.proven
    assert period(proof.schedule) == pytest.approx(optimum)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_proves_small_problems_without_help(problems, data):
    sizes = {"num_microbatches": data.draw(UP_TO_3), "costs": data.draw(COSTS)}
    problem = data.draw(problems(UP_TO_3, UP_TO_3, 3, **sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(milp_module, "adaptive", one_after_the_other)
        proof = milp_proof(problem, use_bound=False)
    verify(proof.schedule)
    assert proof.proven
    assert proof.schedule.solver == "milp"
    assert proof.schedule.problem == problem
    assert proof.bound <= period(adaptive(problem)) * (1 + 1e-9)
    assert period(milp(problem)) == pytest.approx(proof.bound)


TINY = [
    (1, 1, 3, ()),
    (1, 2, 2, ()),
    (1, 3, 1, ()),
    (2, 1, 1, ()),
    (2, 2, 1, ((0, 0),)),
    (2, 2, 1, ((1, 1),)),
    (2, 2, 1, ()),
    (2, 3, 1, ((0, 0), (1, 2))),
]


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 1, 1, 1), Costs(2, 1, 3, 0, 2, 1.0, 2.0)], ids=["1", "2", "3"])
@pytest.mark.parametrize(("D", "P", "M", "failed"), TINY)
def test_no_sequence_of_a_tiny_problem_is_better(no_help, D, P, M, failed, costs, staggered):
    limit = costs.microbatch_peak + costs.f_stash
    problem = Problem(Topology(D, P), M, frozenset(failed), costs, limit, staggered=staggered)
    proof = no_help(problem)
    assert proof.proven
    assert period(proof.schedule) == pytest.approx(best_of_all(problem))


def best_of_all(problem):
    """The shortest period over all executors and all sequences."""
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    names = list(itertools.product(range(D), range(M)))
    choices = [itertools.product(peers, repeat=D * M) for peers in problem.survivors]
    best = np.inf
    for executors in itertools.product(*choices):
        executor_DMP = np.array(executors, np.int32).T.reshape(D, M, P)
        workers = [[name for name in names if executor_DMP[name][p] == d] for d in range(D) for p in range(P)]
        for sequences in itertools.product(*(list(orders(own)) for own in workers)):
            try:
                one = time_round(problem, executor_DMP, sequences)
            except AssertionError:
                continue  # they wait for each other in a cycle
            if one.period < best and peak_memory(Schedule.from_round(problem, "", one)).max() <= problem.memory_limit:
                best = one.period
    return best


def orders(names):
    """All orders of the ops of some micro-batches that are alike: their Fs in order, and so their Bs and their Ws."""
    places = [kind for kind in (Kind.F, Kind.B, Kind.W) for _ in names]
    for kinds in set(itertools.permutations(places)):
        done = dict.fromkeys(places, 0)
        order = []
        for kind in kinds:
            order.append((kind, *names[done[kind]]))
            done[kind] += 1
            if done[kind] > done.get(Kind(max(kind - 1, 0)), 0):
                break
        else:
            yield order


def test_costs_that_are_multiples_of_a_tenth(no_help):
    problem = Problem(Topology(2, 2), 2, frozenset({(0, 1)}), TENTHS, 2.0)
    proof = no_help(problem)
    verify(proof.schedule)
    assert proof.proven
    assert proof.bound == pytest.approx(period(milp(problem)))


@pytest.mark.slow
def test_costs_that_are_multiples_of_nothing():
    """Rounded for the model, so that its bound is a little below the schedule, which has the true costs."""
    problem = Problem(Topology(2, 2), 2, frozenset({(0, 1)}), UNEVEN, 2.0)
    proof = milp_proof(problem, use_bound=False)
    verify(proof.schedule)
    assert not proof.proven
    assert 0.97 * period(proof.schedule) < proof.bound < period(proof.schedule)
    assert period(proof.schedule) == pytest.approx(tight_bound(problem))


def test_refutes_what_the_bound_allows():
    proof = milp_proof(GAP)
    assert tight_bound(GAP) == 19.0
    assert proof.proven
    assert period(proof.schedule) == proof.bound == 20.0


def test_out_of_time(monkeypatch):
    proof = milp_proof(GAP, time_limit_s=0.0)
    verify(proof.schedule)
    assert not proof.proven
    assert proof.bound == 19.0
    assert period(proof.schedule) == period(adaptive(GAP))
    monkeypatch.setattr(milp_module, "milp_proof", lambda *_: proof)
    with pytest.warns(UserWarning, match=r"milp found a period of 2\d; the proved lower bound is 19"):
        assert milp(GAP) is proof.schedule


def test_no_solver_where_the_bound_is_met(monkeypatch):
    def no_solver(*_):
        raise AssertionError

    monkeypatch.setattr(milp_module, "fit", no_solver)
    proof = milp_proof(Problem(Topology(3, 4), 6, frozenset({(1, 2)})))
    assert proof.proven
    assert period(proof.schedule) == proof.bound == 27.0


def test_prints_nothing(capfd, no_help):
    no_help(Problem(Topology(2, 2), 2, frozenset({(0, 1)}), memory_limit=2.0))
    assert capfd.readouterr() == ("", "")


def test_refuses_what_it_does_not_model():
    problem = Problem(Topology(1, 2), 2, costs=Costs(inbox=0.5))
    assert milp_proof(problem).proven
    with pytest.raises(SettingError, match="solver = 'milp': does not count the memory of messages"):
        milp(replace(problem, memory_limit=3.0))


def test_refuses_what_is_too_large(monkeypatch):
    monkeypatch.setattr(milp_module, "adaptive", one_after_the_other)
    with pytest.raises(SettingError, match="solver = 'milp': too large"):
        milp(Problem(Topology(2, 16), 32))


def test_a_proof_needs_the_bound():
    schedule = adaptive(GAP)
    assert Proof(schedule, period(schedule)).proven
    assert not Proof(schedule, period(schedule) - 0.01).proven
