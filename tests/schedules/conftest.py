"""Random problems, and valid schedules of them that no planner made."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from swift.schedules import Costs, Kind, Problem, Schedule
from swift.schedules.sequences import time_round
from swift.topology import Topology

PIPELINES, STAGES = st.integers(1, 3), st.integers(1, 4)
TIMES = st.integers(1, 20).map(lambda tenths: tenths / 10)
TIMES_OR_NONE = st.just(0.0) | TIMES
SIZES = st.sampled_from([0.25, 0.5, 1.0, 2.0])

COSTS = st.just(Costs()) | st.builds(
    Costs, TIMES, TIMES, TIMES, TIMES_OR_NONE, TIMES_OR_NONE, SIZES, st.just(0.0) | SIZES, st.just(0.0) | SIZES
)


@st.composite
def draw_problems(draw, num_pipelines=PIPELINES, num_stages=STAGES, most_failed=2, **fixed):
    """Any problem; its memory limit is that of one micro-batch, or more, or there is none."""
    topology = Topology(draw(num_pipelines), draw(num_stages))
    failed: frozenset = frozenset()
    for worker in draw(st.lists(st.sampled_from(topology.workers), max_size=most_failed, unique=True)):
        stage = {(d, worker[1]) for d in range(topology.num_pipelines)}
        failed |= {worker} if stage - failed - {worker} else set()
    settings = {
        "num_microbatches": draw(st.integers(1, 5)),
        "costs": draw(COSTS),
        "num_iterations": draw(st.integers(1, 3)),
        "decoupled": draw(st.booleans()),
        "staggered": draw(st.booleans()),
    } | fixed
    problem = Problem(topology, failed=failed, **settings)
    more = draw(st.none() | st.integers(0, 8))
    if "memory_limit" in fixed or more is None:
        return problem
    return replace(problem, memory_limit=problem.costs.microbatch_peak + more / 2)


def draw_sequences(problem, random):
    """Executors of all micro-batches, and an order of every worker's ops that can be kept: that of one random order.

    The order is of no kind, or prefers some kinds of ops at some stages to others.
    """
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    executor_DMP = np.array(
        [[[random.choice(problem.survivors[p]) for p in range(P)] for _ in range(M)] for _ in range(D)]
    )
    sequences = [[] for _ in range(D * P)]
    ready = [(Kind.F, d, m, 0) for d in range(D) for m in range(M)]
    rank = {(kind, p): random.random() for kind in Kind for p in range(P)}
    preferring = random.random() < 0.5
    while ready:
        ready.sort(key=lambda op: rank[op[0], op[3]] if preferring else random.random())
        kind, d, m, p = ready.pop(0)
        sequence = sequences[executor_DMP[d, m, p] * P + p]
        sequence.append((kind, d, m))
        if kind == Kind.F:
            ready.append((Kind.F, d, m, p + 1) if p + 1 < P else (Kind.B, d, m, p))
        elif kind == Kind.B:
            ready += [(Kind.B, d, m, p - 1)] if p else []
            if problem.decoupled:
                ready.append((Kind.W, d, m, p))
            else:
                sequence.append((Kind.W, d, m))
    return executor_DMP, sequences


def draw_schedule(problem, random):
    """A valid schedule of a problem, but for its memory limit."""
    return Schedule.from_round(problem, "random", time_round(problem, *draw_sequences(problem, random)))


@pytest.fixture(scope="session")
def problems():
    return draw_problems


@pytest.fixture(scope="session")
def random_sequences():
    return draw_sequences


@pytest.fixture(scope="session")
def random_schedule():
    return draw_schedule
