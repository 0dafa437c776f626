"""``swift import`` and ``swift export --format hf``: models of the Hugging Face hub."""

import argparse

from swift.cli.commands import OF_TRAINING, prepare
from swift.cli.configuration import load_stored
from swift.errors import SettingError
from swift.models import GPT, Weights
from swift.runlog import METRICS
from swift.train import find_checkpoint, load_exported, load_weights
from swift.train.hugging_face import export_hugging_face, import_hugging_face
from swift.train.settings import OF_RUN


def import_model(options: argparse.Namespace) -> None:
    """``swift import DIR --out MODEL``."""
    experiment = import_hugging_face(options.directory, options.out)
    model = experiment.model
    print(
        f"{options.out}: {model.num_layers} layers of {model.model_dim}, {experiment.experts.num_classes} experts; "
        f"try: swift generate {options.out}"
    )


def export_to_hub(options: argparse.Namespace) -> None:
    """``swift export RUN_DIR --format hf --out DIR``; RUN_DIR may be a model directory."""
    is_run = (options.run_dir / METRICS).exists()
    if options.step is not None and not is_run:
        raise SettingError("--step", options.step, f"is for a run, and {options.run_dir} is a model")
    experiment = load_stored(options.run_dir, "RUN_DIR", options.config, spared=OF_RUN if is_run else OF_TRAINING)
    prepare([experiment], num_devices=1)

    def load() -> tuple[GPT, Weights]:
        if not is_run:
            return load_exported(experiment, options.run_dir)
        plan = find_checkpoint(experiment, options.run_dir, options.step)
        return load_weights(experiment, options.run_dir, plan)

    export_hugging_face(experiment, load, options.out, options.dtype)
    print(f"{options.out}: a directory for transformers' AutoModelForCausalLM.from_pretrained")
