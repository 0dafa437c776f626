"""Three input pipelines (text, images, audio), each for Swift and as plain functions for other libraries.

Inputs are generated here: texts from the standard library, and images and sounds from random numbers.
"""

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io.wavfile
import scipy.signal
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from swift.data.pipeline import Pipeline
from swift.data.records import JsonLines, Rows
from swift.data.sources import StandardLibrary
from swift.data.tokenizer import TokenizerFile

CASES = ("text", "images", "audio")
ROW, BATCH = 256, 8
MEAN, DEVIATION = np.float32([0.48, 0.46, 0.41]), np.float32([0.23, 0.22, 0.22])
SIDE, CROP = 192, 96
RATE, FRAME, MASKED = 16_000, 256, 20


@dataclass(frozen=True)
class Case:
    """One pipeline.

    Attributes:
        name: name of the case.
        pipeline: Swift pipeline as written, up to batches.
        records: records of the source.
        steps: the deterministic operators as functions of a sample, applied in order.
        draws: random operators applied after the steps, as functions of a sample and a generator.
        keeps: filter applied after the steps to samples with ``tokens``, which are then packed; None for neither.
    """

    name: str
    pipeline: Pipeline
    records: list[dict[str, Any]]
    steps: tuple[Callable[[Any], dict[str, Any]], ...]
    draws: tuple[Callable[[Any, np.random.Generator], dict[str, Any]], ...] = ()
    keeps: Callable[[Any], bool] | None = None


def texts(num_records: int, directory: Path) -> Case:
    """Builds the text case: decompress documents, tokenize with a trained BPE, drop other languages, pack."""
    documents = StandardLibrary().documents()[:: max(1, 1500 // num_records)][:num_records]
    contents = [str(document.read())[:8000] for document in documents]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel()
    trained.train_from_iterator(contents[:50], trainers.BpeTrainer(vocab_size=2000, special_tokens=["<|endoftext|>"]))
    trained.save(str(directory / "bpe.json"))
    tokenizer = TokenizerFile(str(directory / "bpe.json"))
    records = [
        {"packed": gzip.compress(text.encode()), "language": "en" if number % 3 else "de"}
        for number, text in enumerate(contents)
    ]

    def unpack(sample: Any) -> dict[str, Any]:
        return {"text": gzip.decompress(sample["packed"]).decode()}

    def is_english(sample: Any) -> bool:
        return sample["language"] == "en"

    def to_tokens(sample: Any) -> dict[str, Any]:
        return {"tokens": np.append(tokenizer.encode(sample["text"]), tokenizer.separator).astype(np.int32)}

    rows = Pipeline(Rows(records)).map(unpack, reads=("packed",), writes=("text",)).tokenize(tokenizer)
    pipeline = rows.filter(is_english, reads=("language",)).pack(ROW).batch(BATCH)

    steps = (lambda sample: {**sample, **unpack(sample)}, lambda sample: sample | to_tokens(sample))
    return Case("text", pipeline, records, steps, keeps=is_english)


def images(num_records: int) -> Case:
    """Builds the image case: decode, convert to float, scale the colors, random crop, random mirror."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(num_records):
        small = Image.fromarray(rng.integers(0, 255, (SIDE // 8, SIDE // 8, 3), np.uint8).astype(np.uint8))
        file = io.BytesIO()
        small.resize((SIDE, SIDE)).save(file, "JPEG", quality=90)
        records.append({"file": file.getvalue()})

    def decode(sample: Any) -> dict[str, Any]:
        return {"image": np.asarray(Image.open(io.BytesIO(sample["file"])))}

    def scale(sample: Any) -> dict[str, Any]:
        return {"image": (sample["image"].astype(np.float32) / np.float32(255) - MEAN) / DEVIATION}

    def crop(sample: Any, draw: np.random.Generator) -> dict[str, Any]:
        top, left = draw.integers(0, SIDE - CROP, 2)
        return {"image": sample["image"][top : top + CROP, left : left + CROP]}

    def mirror(sample: Any, draw: np.random.Generator) -> dict[str, Any]:
        return {"image": sample["image"][:, ::-1] if draw.random() < 0.5 else sample["image"]}

    field = {"reads": ("image",), "writes": ("image",)}
    decoded = Pipeline(Rows(records)).map(decode, writes=None, name="decode", reads=("file",))
    scaled = decoded.map(scale, **field)
    cropped = scaled.map(crop, **field, depends_on=("decode",), is_random=True)
    pipeline = cropped.map(mirror, **field, depends_on=("decode",), is_random=True).shuffle().batch(BATCH)

    return Case("images", pipeline, records, (decode, scale), (crop, mirror))


def sounds(num_records: int) -> Case:
    """Builds the audio case: decode, resample, compute the spectrogram, mask random frequencies."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(num_records):
        file = io.BytesIO()
        scipy.io.wavfile.write(file, RATE, (rng.standard_normal(RATE) * 3000).astype(np.int16))
        records.append({"file": file.getvalue()})

    def decode(sample: Any) -> dict[str, Any]:
        rate, sound = scipy.io.wavfile.read(io.BytesIO(sample["file"]))
        return {"sound": sound.astype(np.float32) / np.float32(32768)} if rate == RATE else {}

    def resample(sample: Any) -> dict[str, Any]:
        return {"sound": scipy.signal.resample_poly(sample["sound"], 1, 2).astype(np.float32)}

    def spectrum(sample: Any) -> dict[str, Any]:
        found = scipy.signal.stft(sample["sound"], nperseg=FRAME)[2]
        return {"sound": np.log1p(np.abs(found)).astype(np.float32)}

    def mask(sample: Any, draw: np.random.Generator) -> dict[str, Any]:
        kept = sample["sound"].copy()
        first = int(draw.integers(0, 100))
        kept[first : first + MASKED] = 0
        return {"sound": kept}

    field = {"reads": ("sound",), "writes": ("sound",)}
    read = Pipeline(Rows(records)).map(decode, reads=("file",)).map(resample, **field).map(spectrum, **field)
    pipeline = read.map(mask, **field, is_random=True).shuffle().batch(BATCH)

    return Case("audio", pipeline, records, (decode, resample, spectrum), (mask,))


def spectrogram(sample: Any) -> dict[str, Any]:
    """Generates a sound from a seed, resamples it, and returns its spectrogram."""
    sound = np.random.default_rng(sample["seed"]).standard_normal(4 * RATE, np.float32)
    found = scipy.signal.stft(scipy.signal.resample_poly(sound, 1, 2), nperseg=FRAME)[2]
    return {"sound": np.log1p(np.abs(found)).astype(np.float32)}


def noises(path: str) -> Pipeline:
    """Builds a pipeline over the seeds in a JSON Lines file; it is the same in every process."""
    return Pipeline(JsonLines(path)).map(spectrogram, reads=("seed",), writes=("sound",))


def case_of(name: str, scale: float, directory: Path) -> Case:
    """Builds one of ``CASES`` with 600 x ``scale`` records; the text case stores its tokenizer in ``directory``."""
    num_records = round(600 * scale)
    return texts(num_records, directory) if name == "text" else {"images": images, "audio": sounds}[name](num_records)
