"""Training: an experiment, its program on a mesh, the loop, and what becomes of the model."""

from swift.train.experiment import Experiment, by_rank, put_batch
from swift.train.export import export_model, generate, load_exported
from swift.train.state import Program, TrainState, materialize_all
from swift.train.step import Sums, apply_gradients, compute_gradients, evaluate_step, train_step
from swift.train.trainer import TrainOptions, train

__all__ = [
    "Experiment",
    "Program",
    "Sums",
    "TrainOptions",
    "TrainState",
    "apply_gradients",
    "by_rank",
    "compute_gradients",
    "evaluate_step",
    "export_model",
    "generate",
    "load_exported",
    "materialize_all",
    "put_batch",
    "train",
    "train_step",
]
