"""``swift export`` and ``swift import``: write a run's model, and convert to and from the Hugging Face format."""

import argparse
import sys

from swift.cli.jax_setup import prepare
from swift.cli.stored_model import find_model
from swift.config.gin_reader import load_stored
from swift.config.stored import OF_RUN
from swift.errors import SettingError, printable
from swift.hub.exporting import export_hugging_face, export_model
from swift.hub.importing import import_hugging_face
from swift.runlog.reading import read_run


def import_model(options: argparse.Namespace) -> None:
    """Runs ``swift import DIR --out MODEL``."""
    experiment = import_hugging_face(options.directory, options.out)
    model = experiment.model
    print(
        f"{options.out}: {model.num_layers} layers of {model.model_dim}, {experiment.experts.num_classes} experts; "
        f"try: swift generate {options.out}"
    )


def export(options: argparse.Namespace) -> None:
    """Runs ``swift export RUN_DIR --out MODEL``."""
    if options.dtype is not None:
        raise SettingError("--dtype", options.dtype, "goes with --format hf, which is not set")
    run = read_run(options.run_dir)
    experiment = load_stored(run.path, "RUN_DIR", options.config, optional_settings=OF_RUN)
    prepare([experiment], num_devices=1)
    plan = export_model(experiment, options.run_dir, options.out, options.step)
    oldest = min((copy.step for copy in plan.sources.values()), default=plan.step)
    ages = f", some experts of iteration {oldest}" if oldest < plan.step else ""
    for reason in plan.passed_over:
        print(f"passed over: {reason}", file=sys.stderr)
    print(f"{printable(str(options.out))}: the model of iteration {plan.step}{ages}; try: swift generate {options.out}")


def export_to_hub(options: argparse.Namespace) -> None:
    """Runs ``swift export RUN_DIR --format hf --out DIR``; RUN_DIR may also be a model directory."""
    model = find_model(options.run_dir, "RUN_DIR", options.config, options.step)
    prepare([model.experiment], num_devices=1)
    export_hugging_face(model.experiment, model.load, options.out, options.dtype)
    print(f"{options.out}: a directory for transformers' AutoModelForCausalLM.from_pretrained")
