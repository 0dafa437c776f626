"""A directory of the Hugging Face hub as a model directory: the same parameters under our names, in their own type."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swift.data import DataConfig, TokenizerFile, read_regular
from swift.errors import RunError, SettingError
from swift.experts import ExpertConfig
from swift.files import new_directory, replace_file
from swift.models import GPT
from swift.models.hugging_face import Decoder, TensorPlace, read_decoder, tensor_places
from swift.train.checkpoints import check_new, write_model
from swift.train.hugging_face.parameters import ParameterName, nested, parameter_shapes, part_of
from swift.train.hugging_face.tensor_files import TensorFiles, require_room
from swift.train.settings import GIN_NAME, Experiment, config_text, write_config

CONFIG, TOKENIZER = "config.json", "tokenizer.json"


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
    check_new(out)
    config = _read_json(directory / CONFIG)
    decoder = read_decoder(config, str(directory / CONFIG))
    files = TensorFiles.of(directory)
    gpt = GPT(decoder.model, decoder.vocab_size, decoder.num_experts)
    places = list(tensor_places(decoder.family, gpt))
    _check_tensors(files, places)
    end_of_document = _end_of_document(config, directory / TOKENIZER)
    num_tokens = TokenizerFile(str(directory / TOKENIZER), end_of_document).vocab_size
    if num_tokens > decoder.vocab_size:
        allowed = f"has {num_tokens} tokens, and vocab_size is {decoder.vocab_size} in {CONFIG}"
        raise SettingError("DIR", str(directory / TOKENIZER), allowed)
    try:
        experiment = experiment_of(decoder, TokenizerFile(str(out.resolve() / TOKENIZER), end_of_document))
    except SettingError as error:
        raise SettingError("DIR", str(directory / CONFIG), f"has sizes that do not fit: {error}") from error
    try:
        require_room(out.absolute().parent, sum(files.num_bytes.values()))
        with new_directory(out.absolute()) as made:
            write_model(made, gpt, nested(_arrays(files, gpt, places)), step=0)
            shutil.copyfile(directory / TOKENIZER, made / TOKENIZER)
            replace_file(made / GIN_NAME, config_text(experiment).encode())
            write_config(made, experiment)
    except OSError as error:
        raise RunError(f"{out}: the model cannot be written: {error.strerror}") from error
    return experiment


def experiment_of(decoder: Decoder, tokenizer: TokenizerFile) -> Experiment:
    """Settings with which a model of the hub is run: every token is served by all its experts."""
    experts = ExpertConfig(
        num_classes=decoder.num_experts,
        slots_per_rank=decoder.num_experts,
        top_k=decoder.top_k,
        capacity_factor=None,
        capacity="rank",
        aux_loss_coefficient=decoder.aux_loss_coefficient,
        normalize_gates=decoder.normalizes,
    )
    return Experiment(model=decoder.model, experts=experts, data=DataConfig(tokenizer=tokenizer))


def _check_tensors(files: TensorFiles, places: Sequence[TensorPlace]) -> None:
    wanted = {place.name: place.shape for place in places}
    for name in sorted({*wanted, *files.shapes}):
        there, here = (str(shapes.get(name, "nothing")) for shapes in (files.shapes, wanted))
        if there != here:
            allowed = f"has {there} for {name}, where its {CONFIG} asks for {here}"
            raise SettingError("DIR", str(files.directory), allowed)


def _arrays(files: TensorFiles, gpt: GPT, places: Sequence[TensorPlace]) -> dict[ParameterName, np.ndarray]:
    """Our parameters by (group, row, name), in the types of the tensors."""
    arrays: dict[ParameterName, np.ndarray] = {}
    shapes = parameter_shapes(gpt)
    for place, value in zip(places, files.read([place.name for place in places]), strict=True):
        at = place.group, place.row, place.leaf
        if at not in arrays:
            arrays[at] = np.empty(shapes[at], value.dtype)
        array = arrays[at]
        if value.dtype != array.dtype:
            allowed = f"has {place.name} as {value.dtype} and other parts of the same parameter as {array.dtype}"
            raise SettingError("DIR", str(files.directory), allowed)
        part_of(array, place)[...] = value
    return arrays


def _end_of_document(config: Mapping[str, Any], path: Path) -> str:
    """The token that the model ends a text with."""
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    said = _read_json(path)
    model = said.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = {
        token.get("id"): token.get("content") for token in said.get("added_tokens") or [] if isinstance(token, dict)
    }
    of_model = {number: text for text, number in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    token = added.get(end, of_model.get(end))
    if not isinstance(token, str):
        raise SettingError("DIR", str(path), f"has no token {end!r}, which {CONFIG} names as eos_token_id")
    return token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(read_regular(path))
    except OSError as error:
        raise SettingError("DIR", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError("DIR", str(path), f"is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise SettingError("DIR", str(path), "is not a JSON object")
    return said
