"""``swift import`` and ``swift export --format hf``: models of the Hugging Face hub."""

import argparse

from swift.cli.commands import prepare
from swift.cli.configuration import load_stored
from swift.runlog import METRICS
from swift.train import find_checkpoint, load_exported, load_weights
from swift.train.hugging_face import export_hugging_face, import_hugging_face


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
    experiment = load_stored(options.run_dir, "RUN_DIR", options.config)
    prepare([experiment], num_devices=1)
    if (options.run_dir / METRICS).exists():
        plan = find_checkpoint(experiment, options.run_dir, options.step)
        gpt, weights = load_weights(experiment, options.run_dir, plan)
    else:
        gpt, weights = load_exported(experiment, options.run_dir)
    export_hugging_face(experiment, gpt, weights, options.out, options.dtype)
    print(f"{options.out}: a directory for transformers' AutoModelForCausalLM.from_pretrained")
