"""Small experiments, and what is compiled for them once."""

import pytest

from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.pod_compile.compile import compile_one
from swift.pod_compile.pods import Pod
from swift.topology import Topology
from swift.train.emulated import FailedSet

NOBODY = FailedSet(frozenset(), frozenset())


def experiment(topology: Topology, **settings) -> Experiment:
    """A layer of each kind in every stage."""
    return Experiment(
        model=ModelConfig(2 * topology.num_stages, 16, 2, 24, 8, (False, True)),
        experts=ExpertConfig(4, 3),
        topology=topology,
        sequences_per_microbatch=2 * topology.num_expert_ranks,
        **settings,
    )


@pytest.fixture(scope="package")
def lone():
    """(experiment, report) of 4 ranks, 3 micro-batches."""
    one = experiment(Topology(num_expert_ranks=4), num_microbatches=3)
    return one, compile_one(one, Pod.parse("cpu:4"), NOBODY)


@pytest.fixture(scope="package")
def pipelines():
    """(experiment, report) of 3 pipelines of 2 stages with 2 ranks each, one of whose workers is down; windows of 2."""
    settings = {"num_microbatches": 2, "window": 2, "wire_dtype": "bfloat16"}
    one = experiment(Topology(3, 2, 2), **settings)
    return one, compile_one(one, Pod.parse("cpu:12"), FailedSet(frozenset({(1, 1)}), frozenset()))
