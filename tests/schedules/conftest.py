"""Random problems, and valid schedules of them that no planner made."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from swift.schedules.problem import Chunk, Costs, Kind, Problem
from swift.schedules.schedule import Schedule
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


CHUNKS = st.builds(Chunk, st.integers(0, 3), TIMES, TIMES, TIMES, TIMES_OR_NONE, SIZES, st.just(0.0) | SIZES)


@st.composite
def draw_chunk_problems(draw, num_pipelines=PIPELINES, num_stages=STAGES, costs=COSTS, chunks=CHUNKS, **fixed):
    """Any problem with chunks on any stages, and any number of micro-batches in each pipeline; few of them fail."""
    D, P = draw(num_pipelines), draw(num_stages)
    C = draw(st.integers(1, 5))
    v_shape = (*range(P), *reversed(range(P)))
    anywhere = st.tuples(*[st.integers(0, P - 1)] * C)
    in_a_row = anywhere.map(lambda stages: tuple(sorted(stages)))
    alike = st.just(v_shape) | st.just((*range(P), *range(P))) | anywhere
    holders = draw(alike.map(lambda stages: (stages,) * D) | st.tuples(*[in_a_row] * D) | st.tuples(*[anywhere] * D))
    counts = draw(st.integers(1, 4) | st.tuples(*[st.integers(0, 4)] * D).filter(any))
    settings = {
        "num_microbatches": counts,
        "costs": draw(costs),
        "num_iterations": draw(st.integers(1, 3)),
        "decoupled": draw(st.booleans()),
        "staggered": draw(st.booleans()),
        "chunks": draw(st.just(()) | st.tuples(*[chunks] * len(holders[0]))),
        "stage_of_chunk": holders,
    } | fixed
    problem = Problem(Topology(D, P), **settings)
    for worker in draw(st.lists(st.sampled_from(problem.topology.workers), max_size=2, unique=True)):
        others = [peers for k, peers in enumerate(problem.survivors) if k in problem.held_by(worker)]
        if all(set(peers) - {worker[0]} for peers in others):
            problem = replace(problem, failed=problem.failed | {worker})
    more = draw(st.none() | st.integers(0, 8))
    return problem if more is None else replace(problem, memory_limit=problem.microbatch_peak + more / 2)


def draw_sequences(problem, random):
    """Executors of all micro-batches, and an order of every worker's ops that can be kept: that of one random order.

    The order is of no kind, or prefers some kinds of ops at some chunks to others.
    """
    D, M, S, C = problem.num_pipelines, problem.most_microbatches, problem.num_stages, problem.num_chunks
    names = [(d, m) for d in range(D) for m in range(problem.microbatches[d])]
    executor_DMP = np.full((D, M, C), -1)
    for name in names:
        executor_DMP[name] = [random.choice(problem.survivors[p]) for p in range(C)]
    sequences = [[] for _ in range(D * S)]
    ready = [(Kind.F, d, m, 0) for d, m in names]
    rank = {(kind, p): random.random() for kind in Kind for p in range(C)}
    preferring = random.random() < 0.5
    while ready:
        ready.sort(key=lambda op: rank[op[0], op[3]] if preferring else random.random())
        kind, d, m, p = ready.pop(0)
        host = executor_DMP[d, m, p]
        sequence, its = sequences[problem.worker_DP[host, p]], () if problem.is_plain else (p,)
        sequence.append((kind, d, m, *its))
        if kind == Kind.F:
            ready.append((Kind.F, d, m, p + 1) if p + 1 < C else (Kind.B, d, m, p))
        elif kind == Kind.B:
            ready += [(Kind.B, d, m, p - 1)] if p else []
            if problem.decoupled:
                ready.append((Kind.W, d, m, p))
            else:
                sequence.append((Kind.W, d, m, *its))
    return executor_DMP, sequences


def draw_schedule(problem, random):
    """A valid schedule of a problem, but for its memory limit."""
    return Schedule.from_round(problem, "random", time_round(problem, *draw_sequences(problem, random)))


@pytest.fixture(scope="session")
def problems():
    return draw_problems


@pytest.fixture(scope="session")
def chunk_problems():
    return draw_chunk_problems


@pytest.fixture(scope="session")
def random_sequences():
    return draw_sequences


@pytest.fixture(scope="session")
def random_schedule():
    return draw_schedule
