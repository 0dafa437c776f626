"""``swift generate``: continues texts with the model in a model directory."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from swift.cli.jax_setup import prepare
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.config.stored import GIN_NAME, OF_TRAINING
from swift.errors import SettingError, renamed_settings
from swift.generate.continuation import generate as generate_text
from swift.generate.paged_model import check_devices, check_expert_ranks
from swift.generate.request import Sampling
from swift.runlog.files import METRICS

_DEFAULT_PROMPT = "def "
"""The default prompt."""


def prepare_engine(expert_ranks: int, experiments: Sequence[Experiment]) -> None:
    """Configures JAX for engines that spread experts over devices; must be called before JAX creates a backend.

    Args:
        expert_ranks: value of ``--expert-ranks``; on emulated devices, also the number of devices to emulate.
        experiments: settings of each model that the command will load.

    Raises:
        SettingError: a model's experts cannot be divided evenly among the devices, or there are too few devices.
    """
    with renamed_settings({"TextEngineConfig.expert_ranks": "--expert-ranks"}):
        for experiment in experiments:
            check_expert_ranks(expert_ranks, experiment.experts.num_classes)
        prepare(experiments, num_devices=expert_ranks)
        check_devices(expert_ranks)


def generate(options: argparse.Namespace) -> None:
    """Runs ``swift generate MODEL``."""
    if not (options.model / GIN_NAME).is_file():
        raise SettingError("MODEL", str(options.model), "is not a model written by `swift export`")
    if (options.model / METRICS).exists():
        raise SettingError("MODEL", str(options.model), "is a run directory; write its model with `swift export` first")
    experiment = load_stored(options.model, "MODEL", options.config, optional_settings=OF_TRAINING)
    prepare_engine(options.expert_ranks, [experiment])
    prompts = options.prompt or [_DEFAULT_PROMPT]
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    pieces = generate_text(experiment, options.model, prompts, options.tokens, sampling, options.expert_ranks)
    if options.format == "text" and len(prompts) == 1:
        _show_live(prompts[0], (piece for _, piece in pieces))
        return
    texts = [""] * len(prompts)
    for number, piece in pieces:
        texts[number] += piece
    continued = list(zip(prompts, texts, strict=True))
    if options.format == "json":
        for prompt, text in continued:
            print(json.dumps({"prompt": prompt, "text": text}))
    else:
        print("\n\n".join(prompt + text for prompt, text in continued))


def _show_live(prompt: str, pieces: Iterable[str]) -> None:
    """Prints a prompt and then its continuation, piece by piece, while it is generated."""
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
