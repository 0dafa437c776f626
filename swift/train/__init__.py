"""Training: an experiment, its program on a mesh, the loop, and what becomes of the model."""

from swift.train.export import export_model, generate, load_exported
from swift.train.settings.experiment import Experiment
from swift.train.start import TrainOptions
from swift.train.trainer import train

__all__ = ["Experiment", "TrainOptions", "export_model", "generate", "load_exported", "train"]
