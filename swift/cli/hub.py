"""``swift import`` and ``swift export --format hf``: models of the Hugging Face hub."""

import argparse

from swift.cli.stored_model import find_model
from swift.cli.train import prepare
from swift.hub.exporting import export_hugging_face
from swift.hub.importing import import_hugging_face


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
    found = find_model(options.run_dir, "RUN_DIR", options.config, options.step)
    prepare([found.experiment], num_devices=1)
    export_hugging_face(found.experiment, found.load, options.out, options.dtype)
    print(f"{options.out}: a directory for transformers' AutoModelForCausalLM.from_pretrained")
