"""A run that saves one expert of each layer at a time, and what its record says of it."""

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.reader import load_plan, plan_restore
from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.saved_state import split_of

CLASSES = 4
TINY = ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=16, sequence_length=16, moe_pattern=(True,))


def saving_one_expert(corpus):
    """An experiment that saves in every other iteration, and then one of four experts in each layer."""
    return Experiment(
        model=TINY,
        experts=ExpertConfig(num_classes=CLASSES, slots_per_rank=3),
        topology=Topology(num_expert_ranks=2),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2),
        num_steps=20,
        sequences_per_microbatch=4,
        eval_every=0,
        checkpoint=CheckpointConfig(every=2, num_kept=3, experts_per_layer=1),
    )


def state_of(experiment, run_dir, step):
    directory, split = run_dir / "checkpoints", split_of(make_step_spec(experiment))
    state = load_plan(directory, plan_restore(directory, experiment.identity(), step), split)
    return split.shapes.keys(), split, state


def events(run_dir, name):
    return [event for event in read_run(run_dir).events if event["event"] == name]


def lost_updates(metrics, sources, step):
    """Counts by layer what the metrics say was routed to experts, and not dropped, after the copies they came from."""
    lost = [0] * 2
    for record in metrics[:step]:
        for layer in range(2):
            for class_ in range(CLASSES):
                if record["step"] > sources[layer, class_]:
                    lost[layer] += record["popularity"][layer][class_] - record["dropped"][layer][class_]
    return lost
