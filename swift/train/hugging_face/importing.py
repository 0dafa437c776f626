"""A directory of the Hugging Face hub as a model directory: the same parameters under our names, in their own type."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from swift.data import DataConfig, TokenizerFile
from swift.errors import SettingError
from swift.experts import ExpertConfig
from swift.models import GPT
from swift.models.hugging_face import Decoder, TensorPlace, read_decoder, tensor_places
from swift.train.export import write_model
from swift.train.hugging_face.tensor_files import TensorFiles, require_room
from swift.train.settings import Experiment

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_MOST_CONFIG_BYTES = 2**24


def import_hugging_face(directory: Path, out: Path) -> Experiment:
    """Makes a model directory.

    Args:
        directory: holds ``config.json``, ``tokenizer.json`` and safetensors files.
        out: model directory to make.

    Returns:
        The settings of an experiment with that model, which are kept beside the weights.

    Raises:
        SettingError: the directory is of an unknown architecture, a file is missing or cut, or sizes do not agree.
        RunError: the model cannot be written; nothing is left of it.
    """
    decoder = read_decoder(_read_json(directory / CONFIG), str(directory / CONFIG))
    files = TensorFiles.of(directory)
    gpt = GPT(decoder.model, decoder.vocab_size, decoder.num_experts)
    places = list(tensor_places(decoder.family, gpt))
    _check_tensors(files, places)
    ...
