"""``swift generate``: texts continued by a model directory."""

import argparse
import json
import sys
from collections.abc import Iterable

from swift.cli.commands import OF_TRAINING
from swift.cli.configuration import load_stored
from swift.cli.models.expert_ranks import prepare_engine
from swift.errors import SettingError
from swift.generate.sampling import Sampling
from swift.runlog.metrics import METRICS
from swift.train.settings.stored_config import GIN_NAME
from swift.train.text_generation import generate as generate_text

_DEFAULT_PROMPT = "def "
"""The text that is continued unless one is given."""


def generate(options: argparse.Namespace) -> None:
    """``swift generate MODEL``."""
    if not (options.model / GIN_NAME).is_file():
        raise SettingError("MODEL", str(options.model), "is not a model written by `swift export`")
    if (options.model / METRICS).exists():
        raise SettingError("MODEL", str(options.model), "is a run directory; write its model with `swift export` first")
    experiment = load_stored(options.model, "MODEL", options.config, spared=OF_TRAINING)
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
    """Prints a text while it is made."""
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
