"""Settings of pipelines that cannot work are told before JAX has done anything: name, value, what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.checkpoint.config import CheckpointConfig
from swift.config.checks import check
from swift.config.cuts import checkpoint_cut, model_chunks
from swift.config.experiment import Experiment
from swift.config.failures import parse_failures
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.topology import Topology
from swift.train.build import make_engine


def make(pipelines=2, stages=2, layers=2, pattern=(True,), layout=None, tied=False, **settings):
    if layout:
        settings["optimizer"] = OptimizerConfig(layout=layout)
    model = ModelConfig(
        num_layers=layers,
        model_dim=16,
        num_heads=2,
        ffn_dim=16,
        sequence_length=8,
        moe_pattern=pattern,
        tied_embeddings=tied,
    )
    return Experiment(model=model, topology=Topology(pipelines, stages, 2), num_steps=60, **settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"stages": 4},
            "Topology.num_stages = 4: must be at most ModelConfig.num_layers = 2: every stage needs a layer",
        ),
        (
            {"layers": 3, "cut": (1, 1)},
            "Experiment.cut = (1, 1): must sum to ModelConfig.num_layers = 3, not 2",
        ),
        (
            {"layers": 3, "cut": (3, 0)},
            "Experiment.cut = (3, 0): must be whole numbers of at least 1: every stage needs a layer",
        ),
        ({"layers": 3, "cut": 3}, "Experiment.cut = 3: must be 2 numbers of layers"),
        ({"layers": 3, "cut": (1, 1, 1)}, "Experiment.cut = (1, 1, 1): must be Topology.num_stages = 2 numbers"),
        (
            {"layers": 3, "cut": ((2, 1),)},
            "Experiment.cut = ((2, 1),): must have one list of numbers for each of Topology.num_pipelines = 2",
        ),
        (
            {"layers": 3, "cut": ((2, 1), (3, 0))},
            "Experiment.cut[1] = (3, 0): must be whole numbers of at least 1: every stage needs a layer",
        ),
        (
            {"layers": 3, "cut": ((2, 1), (2, 2))},
            "Experiment.cut[1] = (2, 2): must sum to ModelConfig.num_layers = 3, not 4",
        ),
        ({"layers": 3, "cut": ((2, 1), 3)}, "Experiment.cut[1] = 3: must be 2 numbers of layers"),
        (
            {"layers": 3, "planner": "v"},
            "Topology.num_stages = 2: must be at most ModelConfig.num_layers = 3 / 2: every run needs a layer",
        ),
        (
            {"layers": 4, "planner": "v", "cut": (2, 2)},
            "Experiment.cut = (2, 2): must be Topology.num_stages = 2 times 2 numbers",
        ),
        (
            {"layers": 5, "planner": "v", "cut": ((2, 1, 1, 1), (1, 2, 1, 1))},
            "Experiment.planner = 'v': plans pipelines that are alike, and Experiment.cut differs between them",
        ),
        (
            {"microbatches": (1,)},
            "Experiment.microbatches = (1,): must be a number for each of Topology.num_pipelines = 2",
        ),
        ({"microbatches": (2, 0)}, "Experiment.microbatches = (2, 0): must be whole numbers of at least 1"),
        (
            {"microbatches": (3, 2), "num_microbatches": 2},
            "Experiment.microbatches = (3, 2): must sum to 2 times Experiment.num_microbatches = 2, not 5",
        ),
        ({"num_microbatches": 0}, "Experiment.num_microbatches = 0: must be a whole number of at least 1"),
        ({"num_microbatches": 2.0}, "Experiment.num_microbatches = 2.0: must be a whole number of at least 1"),
        (
            {"sequences_per_microbatch": 1},
            "Experiment.sequences_per_microbatch = 1: must be at least Topology.num_expert_ranks = 2",
        ),
        (
            {"planner": "magic"},
            "Experiment.planner = 'magic': choose one of adaptive, lockstep, milp, gpipe, one_f_one_b, zero_bubble, v",
        ),
        (
            {"planner": "gpipe", "failures": ("step 2: fail 0:0",)},
            "Experiment.planner = 'gpipe': plans without failures only, and Experiment.failures lists some; choose one "
            "of adaptive, lockstep, milp, v",
        ),
        (
            {"optimizer": OptimizerConfig(layout="coupled")},
            "OptimizerConfig.layout = 'coupled': runs with one pipeline of one stage only, and the topology has (2, 2)"
            ": use decoupled",
        ),
        ({"window": 0}, "Experiment.window = 0: must be a whole number of at least 1"),
        (
            {"pipelines": 1, "stages": 1, "window": 3},
            "Experiment.window = 3: must be 1 with a single worker",
        ),
        (
            {"pipelines": 1, "stages": 1, "memory_limit": 4},
            "Experiment.memory_limit = 4: must be None with a single worker",
        ),
        (
            {"memory_limit": 0.9},
            "Experiment.memory_limit = 0.9: must be at least 1, which a single micro-batch takes with its message and "
            "while B runs",
        ),
        ({"memory_limit": float("nan")}, "Experiment.memory_limit = nan: must be a number above 0"),
        (
            {"remat": "full"},
            "Experiment.remat = 'full': must be one of none, attention, block",
        ),
        ({"remat": 1}, "Experiment.remat = 1: must be one of none, attention, block"),
        ({"head": "half"}, "Experiment.head = 'half': must be one of replicated, sharded"),
        (
            {"head": "sharded", "tied": True},
            "Experiment.head = 'sharded': must be 'replicated' with ModelConfig.tied_embeddings = True: every rank has "
            "the whole embedding",
        ),
        ({"embedding": True}, "Experiment.embedding = True: must be one of replicated, sharded"),
        (
            {"embedding": "sharded", "tied": True},
            "Experiment.embedding = 'sharded': must be 'replicated' with ModelConfig.tied_embeddings = True: every "
            "rank has the whole embedding",
        ),
        (
            {"embedding": "sharded", "pipelines": 1, "failures": ("step 2: fail 0:0 rank 1",)},
            "Experiment.embedding = 'sharded': must be 'replicated' where Experiment.failures has expert ranks: each "
            "is a copy of what the others lose",
        ),
        (
            {"head": "sharded", "pipelines": 1, "failures": ("step 2: fail 0:0 rank 1",)},
            "Experiment.head = 'sharded': must be 'replicated' where Experiment.failures has expert ranks: each "
            "is a copy of what the others lose",
        ),
        (
            {"failures": "step 2: fail 0:0"},
            "Experiment.failures = 'step 2: fail 0:0': must be a list of texts, such as ['step 20: fail 1:2']",
        ),
        (
            {"failures": ("step 2: die 0:0",)},
            "Experiment.failures = 'step 2: die 0:0': must be 'step STEP: fail PIPELINE:STAGE' or 'step STEP: rejoin "
            "...'",
        ),
        (
            {"failures": ("step 2: fail 2:0",)},
            "Experiment.failures = 'step 2: fail 2:0': no such worker among 2 pipelines x 2 stages, both counted "
            "from 0",
        ),
        (
            {"failures": ("step 61: fail 0:0",)},
            "Experiment.failures = 'step 61: fail 0:0': the step must be 1 to Experiment.num_steps = 60",
        ),
        (
            {"failures": ("step 2: fail 0:1", "step 9: fail 1:1")},
            "Experiment.failures = 'step 9: fail 1:1': leaves stage 1 without a live worker",
        ),
        (
            {"failures": ("step 2: rejoin 0:1",)},
            "Experiment.failures = 'step 2: rejoin 0:1': worker 0:1 is live at that time",
        ),
        (
            {"failures": ("step 2: fail 0:1", "step 4: rejoin 0:1", "step 5: fail 1:1"), "window": 3},
            "Experiment.failures = 'step 5: fail 1:1': may leave stage 1 without a live worker: in a window of "
            "Experiment.window = 3 iterations, what fails is down from the start, and what rejoins is back after the "
            "end",
        ),
        (
            {"checkpoint": CheckpointConfig(snapshot_every=1)},
            "CheckpointConfig.snapshot_every = 1: must be 0 with several pipelines, where peers have what is lost",
        ),
        (
            {"pipelines": 1, "window": 3, "checkpoint": CheckpointConfig(snapshot_every=2)},
            "Experiment.window = 3: must be at most CheckpointConfig.snapshot_every = 2, or every window would be "
            "cut short",
        ),
        (
            {"checkpoint": CheckpointConfig(snapshot_every=5, snapshot_experts_per_layer=17)},
            "CheckpointConfig.snapshot_experts_per_layer = 17: must be at most ExpertConfig.num_classes = 8; 'all' for "
            "whole snapshots",
        ),
        (
            {"pipelines": 1, "stages": 1, "layout": "coupled", "checkpoint": CheckpointConfig(snapshot_every=1)},
            "CheckpointConfig.snapshot_every = 1: must be 0 with OptimizerConfig.layout = 'coupled', whose state is "
            "tied to its ranks",
        ),
        (
            {"pipelines": 1, "stages": 1, "layout": "coupled", "failures": ("step 2: fail 0:0 rank 1",)},
            "OptimizerConfig.layout = 'coupled': ties state to its ranks, and some fail in Experiment.failures: use "
            "decoupled",
        ),
        (
            {"failures": ("step 2: fail 0:0 rank 1",)},
            "Experiment.failures = 'step 2: fail 0:0 rank 1': may name a rank with one pipeline only: where a stage "
            "has peers, its worker fails as a whole",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_a_setting_that_cannot_work_is_told_with_what_would(settings, line):
    with pytest.raises(SettingError) as raised:
        check(make(**settings))
    assert str(raised.value) == line


@pytest.mark.parametrize(
    ("rejoin", "fail", "window"),
    [
        (4, 4, 1),  # who is back has copied the state of its stage before the other one fails
        (4, 6, 3),  # a window that ends with the failure begins with the one who is back
        (4, 30, 3),
    ],
)
def test_failures_that_are_far_enough_apart_for_the_window_are_taken(rejoin, fail, window):
    failures = ("step 2: fail 0:1", f"step {rejoin}: rejoin 0:1", f"step {fail}: fail 1:1")
    assert make(failures=failures, window=window).failures == failures


def test_a_micro_batch_that_does_not_fit_is_told_with_the_least_that_does():
    with pytest.raises(
        SettingError, match=r"^Experiment.memory_limit = 1: must be at least 1\.\d+, which a single "
    ) as e:
        make_engine(make(num_microbatches=2, memory_limit=1), frozenset(), "none")
    least = float(e.value.allowed.split(",")[0].removeprefix("must be at least "))
    assert make_engine(make(num_microbatches=2, memory_limit=least), frozenset(), "none").num_live == 4


@st.composite
def two_stints(draw):
    """One worker of a stage of two is down for a while, and later the other: texts, and a window."""
    steps = sorted(draw(st.lists(st.integers(1, 30), min_size=3, max_size=3)))
    down, back, other = steps[0], max(steps[1], steps[0] + 1), max(steps[2], steps[0] + 1)
    texts = (f"step {down}: fail 0:0", f"step {back}: rejoin 0:0", f"step {max(other, back)}: fail 1:0")
    return texts, draw(st.integers(1, 6))


@given(two_stints())
def test_a_list_is_refused_just_where_some_window_would_have_nobody_at_a_stage(case):
    texts, window = case
    told = parse_failures(texts, Topology(2, 1), 40)
    stage = {(0, 0), (1, 0)}
    is_lost = any(told.failed(first, first + window - 1) == stage for first in range(1, 41))
    if is_lost:
        with pytest.raises(SettingError, match="may leave stage 0 without a live worker"):
            parse_failures(texts, Topology(2, 1), 40, window)
    else:
        assert parse_failures(texts, Topology(2, 1), 40, window) == told


def test_a_rank_alone_has_nobody_to_keep_its_snapshots():
    with pytest.raises(SettingError) as raised:
        check(
            Experiment(
                experts=ExpertConfig(4, slots_per_rank=4),
                topology=Topology(),
                checkpoint=CheckpointConfig(snapshot_every=1),
            )
        )
    assert str(raised.value) == (
        "CheckpointConfig.snapshot_every = 1: must be 0 with one expert rank: there is no other to keep its snapshot"
    )


def test_a_planner_for_no_failures_runs_what_is_left_of_a_pipeline():
    failures = ("step 2: fail 0:0 rank 1",)
    assert make(pipelines=1, planner="gpipe", failures=failures).failures == failures


def test_two_runs_of_layers_a_stage():
    """The first and the last on stage 0; checkpoints are cut into stages of one run, whatever the planner."""
    one = make(layers=7, pattern=(False, *[True] * 6), planner="v", cut=(1, 2, 3, 1))
    assert model_chunks(one).stage_DC == ((0, 1, 1, 0),) * 2
    assert model_chunks(one).blocks == ((0, 6), (1, 2, 3, 4, 5))
    assert checkpoint_cut(one) == checkpoint_cut(make(layers=7, pattern=(False, *[True] * 6)))
    assert model_chunks(make(layers=8, planner="v")).sizes == (2, 2, 2, 2)
    assert model_chunks(make(stages=1, planner="v")) == model_chunks(make(stages=1))
