"""No formula is above an optimum that the MILP proves without any."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swift.schedules import Costs, Problem, adaptive, lower_bound, period, tight_bound
from swift.schedules.planners.milp import milp_proof
from swift.topology import Topology

TIMES = st.sampled_from([1.0, 2.0, 3.0])
TIMES_OR_NONE = st.sampled_from([0.0, 1.0, 2.0])
SIZES = st.sampled_from([0.5, 1.0, 2.0])
COSTS = st.just(Costs()) | st.builds(Costs, TIMES, TIMES, TIMES, TIMES_OR_NONE, TIMES_OR_NONE, SIZES, SIZES)
UP_TO_3 = st.integers(1, 3)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_never_above_the_proven_optimum(problems, data):
    sizes = {"num_microbatches": data.draw(UP_TO_3), "costs": data.draw(COSTS)}
    problem = data.draw(problems(UP_TO_3, UP_TO_3, 3, **sizes))
    proof = milp_proof(problem, use_bound=False)
    assume(proof.proven)
    optimum = period(proof.schedule) * (1 + 1e-9)
    assert lower_bound(problem) <= tight_bound(problem) * (1 + 1e-9)
    assert tight_bound(problem) <= optimum
    assert proof.bound <= period(adaptive(problem)) * (1 + 1e-9)


@pytest.mark.parametrize("P", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [1, 4, 16])
def test_unit_times_without_failure(P, M):
    problem = Problem(Topology(3, P), M)
    assert lower_bound(problem) == max(3 * M, 2 * P - 1 + 2 * M)


def test_the_paper_s_example():
    for worker in Topology(3, 4).workers:
        assert lower_bound(Problem(Topology(3, 4), 6, frozenset({worker}))) == 27.0


TURNS = [  # D, P, M, failed, costs, limit: more micro-batches than fit at once
    (1, 3, 4, (), Costs(1, 1, 2, 0, 1), 3.0),
    (2, 2, 2, ((0, 0),), Costs(2, 1, 1, 1, 1), 2.0),
    (1, 3, 3, (), Costs(1, 2, 1), 1.0),
    (1, 3, 3, (), Costs(1, 2, 1, 1, 0.5), 2.0),
]


@pytest.mark.parametrize(("D", "P", "M", "failed", "costs", "limit"), TURNS)
def test_memory_that_turns_over_sets_the_optimum(D, P, M, failed, costs, limit):
    problem = Problem(Topology(D, P), M, frozenset(failed), costs, limit)
    proof = milp_proof(problem, use_bound=False)
    assert proof.proven
    assert lower_bound(problem) < tight_bound(problem) == pytest.approx(period(proof.schedule))
