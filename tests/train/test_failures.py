"""The failure list: what it says of windows, held against a plain replay, and every mistake in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.config.experiment import Experiment
from swift.config.failures import FailureEvent, FailureList, failure_list, parse_failures
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure.engine import Engine
from swift.topology import Topology
from swift.train.emulated import EmulatedCluster

TOPOLOGY = Topology(2, 3)
TWICE = ("step 10: fail 1:2", "step 20: rejoin 1:2", "step 30: fail 1:2")


def test_events_come_by_step_and_then_as_listed():
    texts = ["step 9: rejoin 0:1", "step 4: fail 0:1", "  step  9 : fail 1:1 ", "step 9: fail 0:0"]
    assert parse_failures(texts, TOPOLOGY, 9).events == (
        FailureEvent(4, "fail", (0, 1)),
        FailureEvent(9, "rejoin", (0, 1)),
        FailureEvent(9, "fail", (1, 1)),
        FailureEvent(9, "fail", (0, 0)),
    )
    assert parse_failures((), TOPOLOGY, 9) == FailureList()
    assert FailureList().failed(1, 9) == frozenset()


@pytest.mark.parametrize(
    ("first", "last", "is_down"),
    [
        *[(9, 9, False), (10, 10, True), (19, 19, True), (20, 20, False), (29, 29, False), (30, 30, True)],
        *[(7, 9, False), (8, 10, True), (9, 12, True)],  # down from the first step of the window it fails in
        *[
            (18, 20, True),
            (19, 22, True),
            (20, 22, False),
            (21, 23, False),
        ],  # back in the next window
        *[(8, 25, True), (20, 29, False), (20, 30, True), (25, 40, True), (50, 60, True)],
    ],
)
def test_windows(first, last, is_down):
    failures = parse_failures(TWICE, TOPOLOGY, 60)
    assert failures.failed(first, last) == (frozenset([(1, 2)]) if is_down else frozenset())


def test_a_list_is_over_when_nothing_in_it_follows():
    failures = parse_failures(TWICE, TOPOLOGY, 60)
    assert [failures.is_over(step) for step in (1, 29, 30, 60)] == [False, False, True, True]
    assert FailureList().is_over(1)


def cluster(**changes):
    """The emulated cluster of two pipelines that a run begins with."""
    experiment = Experiment(
        model=ModelConfig(num_layers=1, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=16, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=2, slots_per_rank=2),
        topology=Topology(2),
        sequences_per_microbatch=2,
        **changes,
    )
    return EmulatedCluster(experiment, "next", failure_list(experiment), 1, 1)


def test_programs_are_prepared_where_somebody_is_yet_to_fail_and_only_there(monkeypatch):
    prepared = []
    monkeypatch.setattr(Engine, "_make_ready", lambda _, *job: prepared.append(job[1:]))
    with cluster() as quiet:
        quiet.engine.settle()
    assert prepared == []
    with cluster(failures=("step 9: fail 0:0",)) as busy:
        busy.engine.settle()
    assert (frozenset({(0, 0)}), True) in prepared


@st.composite
def lists_of_failures(draw):
    """Texts of a list without mistakes, in any order that keeps that of each step, and the workers down after each."""
    down, texts, after = set(), [], {}
    for step in range(1, 13):
        for worker in draw(st.lists(st.sampled_from(TOPOLOGY.workers), max_size=2, unique=True)):
            if worker in down:
                down.remove(worker)
                texts.append((step, f"step {step}: rejoin {worker[0]}:{worker[1]}"))
            elif (1 - worker[0], worker[1]) not in down:
                down.add(worker)
                texts.append((step, f"step {step}: fail {worker[0]}:{worker[1]}"))
        after[step] = frozenset(down)
    steps = draw(st.permutations(sorted({step for step, _ in texts})))
    return [text for step in steps for of, text in texts if of == step], after


@given(listed=lists_of_failures(), first=st.integers(1, 12), length=st.integers(1, 6))
def test_a_window_does_without_all_that_are_down_at_its_start_or_fail_in_it(listed, first, length):
    texts, after = listed
    failures, last = parse_failures(texts, TOPOLOGY, 12), min(12, first + length - 1)
    assert failures.failed(first, first) == after[first]
    assert failures.failed(first, last) == frozenset().union(*(after[step] for step in range(first, last + 1)))


@pytest.mark.parametrize(
    ("texts", "offending", "reason"),
    [
        (["step 20 fail 1:2"], "step 20 fail 1:2", "must be 'step STEP: fail PIPELINE:STAGE'"),
        (["step 20: dies 1:2"], "step 20: dies 1:2", "must be 'step STEP"),
        (["step 20: fail 1:2 again"], "step 20: fail 1:2 again", "must be 'step STEP"),
        (["step 20: fail 1:2\nstep 30: rejoin 1:2"], "step 20: fail 1:2\nstep 30: rejoin 1:2", "must be 'step STEP"),
        (["step -1: fail 1:2"], "step -1: fail 1:2", "must be 'step STEP"),
        (["step 0: fail 1:2"], "step 0: fail 1:2", "1 to Experiment.num_steps = 60"),
        (["step 5: fail 1:2", "step 61: rejoin 1:2"], "step 61: rejoin 1:2", "1 to Experiment.num_steps = 60"),
        (["step 5: fail 2:0"], "step 5: fail 2:0", "no such worker among 2 pipelines x 3 stages"),
        (["step 5: fail 0:3"], "step 5: fail 0:3", "no such worker"),
        (["step 5: fail 0:0", "step 6: fail 0:0"], "step 6: fail 0:0", "worker 0:0 is down already"),
        (["step 6: rejoin 0:0", "step 7: fail 0:0"], "step 6: rejoin 0:0", "worker 0:0 is live"),
        (["step 6: fail 0:1", "step 5: fail 1:1"], "step 6: fail 0:1", "leaves stage 1 without a live worker"),
        (["step 6: fail 0:1", "step 9: fail 1:1", "step 9: rejoin 0:1"], "step 9: fail 1:1", "leaves stage 1"),
        ("step 5: fail 0:0", "step 5: fail 0:0", "must be a list of texts"),
        ([(5, "fail")], [(5, "fail")], "must be a list of texts"),
        ({"step 5: fail 0:0"}, {"step 5: fail 0:0"}, "must be a list of texts"),
        (None, None, "must be a list of texts"),
    ],
)
def test_mistakes(texts, offending, reason):
    with pytest.raises(SettingError) as raised:
        parse_failures(texts, TOPOLOGY, 60)
    assert (raised.value.setting, raised.value.value) == ("Experiment.failures", offending)
    assert reason in raised.value.allowed
    assert len(str(raised.value).splitlines()) == 1


def test_a_lone_worker_cannot_fail():
    with pytest.raises(SettingError, match="leaves stage 0 without a live worker"):
        parse_failures(["step 1: fail 0:0"], Topology(), 9)


RANKS = Topology(1, 2, 3)


@st.composite
def lists_of_ranks(draw):
    """Lists as above, of the ranks of the only pipeline, some rank of all stages left at any time."""
    down, texts, after = set(), [], {}
    for step in range(1, 13):
        for stage, rank in draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=2, unique=True)):
            if (stage, rank) in down:
                down.remove((stage, rank))
                texts.append((step, f"step {step}: rejoin 0:{stage} rank {rank}"))
            elif len({other for _, other in down} | {rank}) < 3:
                down.add((stage, rank))
                texts.append((step, f"step {step}: fail 0:{stage} rank {rank}"))
        after[step] = frozenset(down)
    steps = draw(st.permutations(sorted({step for step, _ in texts})))
    return [text for step in steps for of, text in texts if of == step], after


@given(listed=lists_of_ranks(), first=st.integers(1, 12), length=st.integers(1, 6))
def test_a_window_does_without_ranks_in_the_same_way(listed, first, length):
    texts, after = listed
    failures, last = parse_failures(texts, RANKS, 12), min(12, first + length - 1)
    assert failures.lost_ranks(first, first) == after[first]
    assert failures.lost_ranks(first, last) == frozenset().union(*(after[step] for step in range(first, last + 1)))
    assert failures.failed(first, last) == frozenset()


@pytest.mark.parametrize(
    ("texts", "window", "reason"),
    [
        (["step 2: fail 0:0 rank"], 1, "must be 'step STEP: fail PIPELINE:STAGE'"),
        (["step 2: fail 0:0 rank -1"], 1, "must be 'step STEP: fail PIPELINE:STAGE'"),
        (["step 2: fail 1:0 rank 0"], 1, "no such worker among 1 pipelines x 2 stages, both counted from 0"),
        (["step 2: fail 0:1 rank 3"], 1, "no such rank among 3, counted from 0"),
        (
            ["step 2: fail 0:0"],
            1,
            "leaves stage 0 without a live worker; a rank of it can fail: 'step 2: fail 0:0 rank 0'",
        ),
        (["step 2: rejoin 0:0 rank 1"], 1, "rank 1 of worker 0:0 is live at that time"),
        (
            ["step 2: fail 0:1 rank 1", "step 3: fail 0:1 rank 1"],
            1,
            "rank 1 of worker 0:1 is down already at that time",
        ),
        (
            ["step 2: fail 0:1 rank 1", "step 2: rejoin 0:1 rank 1"],
            1,
            "rank 1 of worker 0:1 fails in that iteration, and can rejoin after it",
        ),
        (
            ["step 2: fail 0:0 rank 0", "step 3: fail 0:1 rank 1", "step 4: fail 0:0 rank 2"],
            1,
            "leaves no live expert rank that all stages have",
        ),
        (
            [
                "step 2: fail 0:0 rank 0",
                "step 3: fail 0:0 rank 1",
                "step 4: rejoin 0:0 rank 1",
                "step 5: fail 0:0 rank 2",
            ],
            3,
            "may leave no live expert rank that all stages have: in a window of Experiment.window = 3 iterations, what "
            "fails is down from the start, and what rejoins is back after the end",
        ),
    ],
)
def test_mistakes_with_ranks_are_told(texts, window, reason):
    with pytest.raises(SettingError) as raised:
        parse_failures(texts, RANKS, 60, window)
    assert raised.value.allowed.startswith(reason)
    assert raised.value.setting == "Experiment.failures"
    assert raised.value.value == texts[-1]


def test_where_a_stage_has_peers_a_rank_takes_its_worker_with_it():
    with pytest.raises(SettingError) as raised:
        parse_failures(["step 2: fail 0:0 rank 0"], Topology(2, 1, 3), 60)
    assert (
        raised.value.allowed
        == "may name a rank with one pipeline only: where a stage has peers, its worker fails as a whole"
    )
