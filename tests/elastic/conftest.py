"""A run of two expert ranks, each of which is a process, and the checkpoint service of its checkpoints."""

import shutil
from dataclasses import replace

import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.elastic.membership.messages import Process
from swift.elastic.services.checkpoint_service import CheckpointService
from swift.elastic.state.store import SharedMemoryStore
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.mesh.state_rows import shard_shapes
from swift.models.config import ModelConfig
from swift.runlog.expert_counts import CLASS_COUNTS
from swift.runlog.files import METRICS
from swift.topology import Topology
from swift.train.build import make_loader
from swift.train.start import TrainOptions
from swift.train.trainer import train

# A failed assertion in a module of helpers shows its values only if pytest rewrites that module.
pytest.register_assert_rewrite("tests.elastic.membership.script", "tests.elastic.membership.simulation")


@pytest.fixture(scope="session", name="two_ranks")
def _two_ranks(corpus):
    """One worker of two expert ranks."""
    return Experiment(
        model=ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=4, slots_per_rank=4),
        topology=Topology(1, 1, 2),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2),
        num_steps=6,
        sequences_per_microbatch=4,
        eval_every=0,
        checkpoint=CheckpointConfig(every=2, num_kept=3),
    )


@pytest.fixture(scope="session")
def trained(two_ranks, tmp_path_factory):
    """Its run directory after all six iterations."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    train(two_ranks, TrainOptions(run_dir, config_text(two_ranks), prepare="none"))
    return run_dir


@pytest.fixture
def ranks():
    """The processes."""
    return Process((0, 0), 0), Process((0, 0), 1)


@pytest.fixture
def checkpoint_service(two_ranks, trained, tmp_path):
    """The service of the run as it was after four iterations; the parts of the state are kept under (3, 4)."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("step-00000006", "summary.json"))
    (tmp_path / "keeps").mkdir()
    checkpoint_service = CheckpointService(
        experiment=two_ranks,
        checkpoints=tmp_path / "run" / "checkpoints",
        snapshots=tmp_path / "keeps",
        by_rank=True,
        data=make_loader(two_ranks, "train").state(),
    )
    assert checkpoint_service.load(generation=3, processes=[Process((0, 0), rank) for rank in (0, 1)]).step == 4
    return checkpoint_service


@pytest.fixture
def elsewhere(checkpoint_service, tmp_path):
    """A checkpoint service that writes to another run directory."""
    (tmp_path / "elsewhere").mkdir()
    for name in (METRICS, CLASS_COUNTS):
        shutil.copy(tmp_path / "run" / name, tmp_path / "elsewhere")
    return replace(checkpoint_service, checkpoints=tmp_path / "elsewhere" / "checkpoints")


@pytest.fixture(scope="session")
def kept():
    """States that a process has kept."""

    def load(checkpoint_service, process, stamp):
        num_devices = 1 if checkpoint_service.by_rank else checkpoint_service.experiment.topology.num_expert_ranks
        specs = replace(checkpoint_service.spec.specs, slots={})
        return SharedMemoryStore(checkpoint_service.snapshots, process).load(
            stamp, shard_shapes(specs, checkpoint_service.spec.abstract(), num_devices)
        )

    return load
