"""Division of micro-batches: no integer program is solved for what is not planned anyway, and none is missed."""

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as some

from swift.schedules.adapt import mixture
from swift.schedules.adapt.choice import recut
from swift.schedules.adapt.layouts import BlockProblem, layouts
from swift.schedules.adapt.mixture import divide, min_max_load, mixtures, most_whole
from swift.schedules.problem import Chunk, Problem
from swift.topology import Topology


def of_blocks(D, P, a_stage, M):
    blocks = tuple(Chunk.of_size(1 / a_stage, 1) for _ in range(P * a_stage))
    return BlockProblem(Problem(Topology(D, P), M, num_iterations=2), blocks, (a_stage,) * P)


@pytest.fixture
def integer_programs(monkeypatch):
    """Numbers of the whole variables of all integer programs that are solved."""
    found, solve = [], scipy.optimize.milp

    def recorded(*args, **settings):
        if number := int(np.sum(settings["integrality"])):
            found.append(number)
        return solve(*args, **settings)

    monkeypatch.setattr(scipy.optimize, "milp", recorded)
    return found


def test_loads_whose_rest_is_too_large_take_no_integer_program(integer_programs):
    work = of_blocks(24, 64, 4, 128)
    layout = list(layouts(work, frozenset({(1, 32)})))[1]
    routed, _ = mixtures(work, layout)
    assert routed.num_routed == 12
    # Of four loads the least three re-route 131, 92 and 52 micro-batches: one program divides, one rounds.
    assert integer_programs == [24, 24 * 112]


def test_whole_pipelines_are_not_divided_block_by_block(monkeypatch):
    divided = []

    def recorded(worker_DK, *args, **settings):
        divided.append(len(worker_DK))
        return divide(worker_DK, *args, **settings)

    monkeypatch.setattr(mixture, "divide", recorded)
    recut(of_blocks(3, 4, 2, 6), frozenset({(1, 2)}))
    assert set(divided) == {3}


@settings(max_examples=20)
@given(some.integers(2, 4), some.integers(2, 5), some.integers(4, 60), some.integers(0, 30), some.floats(1.001, 1.5))
def test_only_a_rest_that_is_too_large_is_refused(D, K, number, most_rest, more):
    worker_DK = np.arange(D * K).reshape(D, K)
    worker_DK[0, 1:] -= 1  # the first pipeline has a worker less
    cost_K = np.ones(K)
    load = more * min_max_load(worker_DK, cost_K, number)
    whole_D = most_whole(worker_DK, cost_K, number, load, number)
    found_D = most_whole(worker_DK, cost_K, number, load, most_rest)
    if number - whole_D.sum() > most_rest:
        assert found_D is None
    else:
        assert (found_D == whole_D).all()
