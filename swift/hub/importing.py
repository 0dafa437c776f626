"""Import of a Hugging Face model as a model directory, with the same values and dtypes under Swift's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint.units import by_name
from swift.config.experiment import Experiment
from swift.config.stored import GIN_NAME, config_text, write_config
from swift.data.config import DataConfig
from swift.data.tokenizer import TokenizerFile
from swift.errors import SettingError
from swift.experts.config import ExpertConfig, RankCapacity
from swift.experts.routers import TopK
from swift.files import replace_file
from swift.hub.architectures import Decoder, read_decoder
from swift.hub.companions import BEGIN, CONFIG, END, GENERATION, TOKENIZER, copy_tokenizer, read_generation
from swift.hub.tensors import (
    EMBEDDING,
    HEAD,
    Index,
    TensorFiles,
    TensorLocation,
    parts_of_tensor,
    read_object,
    tensor_locations,
)
from swift.models.gpt import GPT
from swift.train.interrupt import Interrupt
from swift.train.model_directory import check_new, new_model, pure, write_model


def import_hugging_face(directory: Path, out: Path) -> Experiment:
    """Converts a Hugging Face directory to a model directory.

    Args:
        directory: directory with ``config.json``, ``tokenizer.json`` and safetensors files.
        out: model directory to create.

    Returns:
        The settings of an experiment with this model, which are also stored in ``out``.

    Raises:
        SettingError: the architecture is unknown, a file is missing or truncated, or sizes do not match.
        RunError: the model cannot be written; no files are left behind.
        KeyboardInterrupt: a signal arrived; no files are left behind.
    """
    check_new(out)
    config = read_object(directory / CONFIG)
    files = TensorFiles.of(directory)
    decoder = _with_own_head(read_decoder(config, str(directory / CONFIG)), files)
    generation = read_generation(directory, config)
    gpt = GPT(decoder.model, decoder.vocab_size, decoder.num_experts)
    locations = list(tensor_locations(decoder.family, gpt))
    parts = _stored_parts(decoder, files)
    _check_shapes(files, parts, locations)
    tokenizer = _read_tokenizer(generation, directory / TOKENIZER)
    if tokenizer.vocab_size > decoder.vocab_size:
        allowed = f"has {tokenizer.vocab_size} tokens, and vocab_size is {decoder.vocab_size} in {CONFIG}"
        raise SettingError("DIR", str(directory / TOKENIZER), allowed)
    try:
        experiment = _experiment_of(decoder, replace(tokenizer, path=str(out.resolve() / TOKENIZER)))
    except SettingError as error:
        raise SettingError("DIR", str(directory / CONFIG), f"has sizes that do not fit: {error}") from error
    with new_model(out) as (model_dir, interrupt):
        write_model(model_dir, gpt, _read_parameters(files, parts, gpt, locations, interrupt), step=0)
        copy_tokenizer(directory, model_dir)
        (model_dir / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
        replace_file(model_dir / GIN_NAME, config_text(experiment).encode())
        write_config(model_dir, experiment)
    return experiment


def _experiment_of(decoder: Decoder, tokenizer: TokenizerFile) -> Experiment:
    """Returns an experiment with an imported model and dropless routing, as in ``transformers``."""
    experts = ExpertConfig(
        num_classes=decoder.num_experts,
        slots_per_rank=decoder.num_experts,
        top_k=decoder.top_k,
        capacity=RankCapacity(factor=None),
        aux_loss_coefficient=decoder.aux_loss_coefficient,
        router=TopK(normalize_gates=decoder.normalizes),
    )
    return Experiment(model=decoder.model, experts=experts, data=DataConfig(tokenizer=tokenizer))


def _with_own_head(decoder: Decoder, files: TensorFiles) -> Decoder:
    """Unties the head from the embedding if the files contain a different head, regardless of the configuration."""
    if not decoder.model.tied_embeddings or not {EMBEDDING, HEAD} <= files.shapes.keys():
        return decoder
    head, embedding = (value for _, value in sorted(files.read(HEAD, EMBEDDING)))
    if head.dtype == embedding.dtype and np.array_equal(head, embedding):
        return decoder
    return replace(decoder, model=replace(decoder.model, tied_embeddings=False))


def _stored_parts(decoder: Decoder, files: TensorFiles) -> dict[str, tuple[str, Index]]:
    """Returns each tensor's location: (stored tensor's name, index of the values in that tensor)."""
    parts: dict[str, tuple[str, Index]] = {}
    for tensor, shape in files.shapes.items():
        for name, index in parts_of_tensor(decoder.family, tensor, shape):
            if name in parts:
                raise SettingError("DIR", str(files.directory), f"has {name} twice: as {parts[name][0]} and {tensor}")
            parts[name] = tensor, index
    if decoder.model.tied_embeddings and HEAD in parts:
        parts.setdefault(EMBEDDING, parts.pop(HEAD))
    return parts


def _check_shapes(
    files: TensorFiles, parts: Mapping[str, tuple[str, Index]], locations: Sequence[TensorLocation]
) -> None:
    expected = {location.name: location.shape for location in locations}
    stored = {name: np.broadcast_to(0, files.shapes[tensor])[index].shape for name, (tensor, index) in parts.items()}
    for name in sorted({*expected, *stored}):
        stored_shape, expected_shape = (str(shapes.get(name, "nothing")) for shapes in (stored, expected))
        if stored_shape != expected_shape:
            allowed = f"has {stored_shape} for {name}, where its {CONFIG} asks for {expected_shape}"
            raise SettingError("DIR", str(files.directory), allowed)


def _read_parameters(
    files: TensorFiles,
    parts: Mapping[str, tuple[str, Index]],
    gpt: GPT,
    locations: Sequence[TensorLocation],
    interrupt: Interrupt,
) -> dict[str, Any]:
    """Reads all parameters, as a tree by group, layer and name, in their stored dtypes."""
    places: dict[str, list[tuple[TensorLocation, Index]]] = {}
    for location in locations:
        tensor, index = parts[location.name]
        places.setdefault(tensor, []).append((location, index))
    tree = pure(gpt.weight_shapes)
    shapes, arrays = by_name(tree), dict[str, np.ndarray]()
    for tensor, value in files.read(*places):
        interrupt.check()
        for location, index in places[tensor]:
            name = location.parameter
            if name not in arrays:
                arrays[name] = np.empty(shapes[name].shape, value.dtype)
            array = arrays[name]
            if value.dtype != array.dtype:
                allowed = f"has {tensor} as {value.dtype} and other parts of the same parameter as {array.dtype}"
                raise SettingError("DIR", str(files.directory), allowed)
            location.part_of(array)[...] = value[index]
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in shapes])


def _read_tokenizer(generation: Mapping[str, Any], path: Path) -> TokenizerFile:
    """Reads the tokenizer, with the BOS and EOS tokens of this model."""
    tokenizer = TokenizerFile(str(path), _end_of_document(generation, path))
    begin = tokenizer.put_before()
    # Use a BOS token only if the tokenizer prepends one by itself, and the model expects the same one.
    begun = tokenizer if begin is None else replace(tokenizer, begin_of_prompt=begin)
    return begun if begun.begin == generation.get(BEGIN) else tokenizer


def _end_of_document(generation: Mapping[str, Any], path: Path) -> str:
    """Returns the model's EOS token, which is the first of ``eos_token_id`` that is in the tokenizer."""
    tokenizer = read_object(path)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise SettingError("DIR", str(path), f"has added_tokens = {added!r:.40}, which is not a list")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    model_tokens = vocabulary.items() if isinstance(vocabulary, dict) else ()
    ends = generation.get(END)
    for end in ends if isinstance(ends, list) else [ends]:
        texts = [token.get("content") for token in added if isinstance(token, dict) and token.get("id") == end]
        texts += [text for text, number in model_tokens if number == end]
        if texts and isinstance(texts[0], str):
            return texts[0]
    raise SettingError("DIR", str(path), f"has no token {ends!r:.40}, which {CONFIG} names as {END}")
