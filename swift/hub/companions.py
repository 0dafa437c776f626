"""The files next to the weights of a Hugging Face model: the tokenizer's files, and the generation settings.

A model directory keeps these files next to ``tokenizer.json``, where an export finds them. They are only used if the
tokenizer file has that name, since a file with another name may be in the directory of a different tokenizer.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.data.tokenizer import TokenizerFile
from swift.errors import renamed_settings
from swift.hub.tensors import read_object

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
TOKENIZER_CONFIG, TEMPLATES = "tokenizer_config.json", "additional_chat_templates"
BEGIN, END, PAD = "bos_token_id", "eos_token_id", "pad_token_id"
_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files from which ``transformers`` may load a tokenizer."""


def copy_tokenizer(directory: Path, model_dir: Path) -> None:
    """Copies the files of a tokenizer, including its chat templates."""
    for name in _FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, model_dir / name)
    if (directory / TEMPLATES).is_dir():
        (model_dir / TEMPLATES).mkdir()
        for path in sorted((directory / TEMPLATES).glob("*.jinja")):
            shutil.copyfile(path, model_dir / TEMPLATES / path.name)


def read_generation(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads ``generation_config.json``, taking special tokens that it lacks from ``config.json``.

    Args:
        directory: directory of the model.
        config: content of ``config.json``.

    Raises:
        SettingError: ``generation_config.json`` is damaged.
    """
    generation = read_object(directory / GENERATION) if (directory / GENERATION).is_file() else {}
    tokens = {key: config[key] for key in (BEGIN, END, PAD) if config.get(key) is not None}
    return tokens | {key: value for key, value in generation.items() if value is not None or key not in tokens}


def generation_of(tokenizer: TokenizerFile) -> dict[str, Any]:
    """Returns the generation settings stored next to a tokenizer file, with the tokenizer's own special tokens.

    Raises:
        SettingError: the tokenizer or ``generation_config.json`` is damaged.
    """
    generation: dict[str, Any] = {}
    if Path(tokenizer.path).name == TOKENIZER:
        with renamed_settings({"DIR": "TokenizerFile.path"}):
            generation = read_generation(Path(tokenizer.path).parent, {})
    ends = generation.get(END)
    end_tokens = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if tokenizer.separator not in end_tokens:
        generation[END] = [tokenizer.separator, *end_tokens] if end_tokens else tokenizer.separator
    return generation if tokenizer.begin is None else generation | {BEGIN: tokenizer.begin}


def special_tokens(generation: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns the special tokens for ``config.json``, with missing ones as null to override the class's defaults.

    Args:
        generation: content of ``generation_config.json``.
        vocab_size: number of rows of the embedding; a padding token outside these rows becomes null.
    """
    pad = generation.get(PAD)
    is_row = isinstance(pad, int) and 0 <= pad < vocab_size
    return {BEGIN: generation.get(BEGIN), END: generation.get(END), PAD: pad if is_row else None}


def write_tokenizer(tokenizer: TokenizerFile, model_dir: Path) -> None:
    """Writes the files from which ``transformers`` loads an equivalent tokenizer."""
    if Path(tokenizer.path).name == TOKENIZER:
        copy_tokenizer(Path(tokenizer.path).parent, model_dir)
    else:
        shutil.copyfile(tokenizer.path, model_dir / TOKENIZER)
    if (model_dir / TOKENIZER_CONFIG).exists():
        return
    # Without a class, transformers would build the family's own tokenizer, which splits text by other rules.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer.begin_of_prompt is not None:
        config["bos_token"] = tokenizer.begin_of_prompt
    config["eos_token"] = tokenizer.end_of_document
    (model_dir / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
