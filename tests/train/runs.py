"""Runs in this process, and what of their records can be compared."""

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train.start import TrainOptions
from swift.train.trainer import train


def two_stages(corpus, num_pipelines, warmup_steps, **settings):
    """Pipelines of two stages, each a layer of experts that drops a third of the tokens."""
    return Experiment(
        model=ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=4, slots_per_rank=4, capacity=SlotCapacity(0.8)),
        topology=Topology(num_pipelines, 2, 1),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=warmup_steps, peak_learning_rate=1e-2),
        compute_dtype="float64",
        sequences_per_microbatch=2,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
        **settings,
    )


def run(experiment, run_dir, failures=None, **options):
    """The run's record; what would be compiled ahead is compiled when it is needed, unless told otherwise."""
    train(experiment, TrainOptions(run_dir, "the same", **{"prepare": "none"} | options), failures)
    return read_run(run_dir)


def measured(record):
    """The steps without what a clock says."""
    return [
        {n: v for n, v in step.items() if n not in ("time", "step_ms", "input_ms", "tokens_per_s", "mfu")}
        for step in record.metrics
    ]
