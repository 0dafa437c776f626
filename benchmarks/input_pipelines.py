"""Three input pipelines, each for Swift and for plain Grain, operator by operator the same: text, images, audio.

Inputs are made here: texts of the standard library, pictures and sounds of random numbers.
"""

import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
import scipy.io.wavfile
import scipy.signal
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from swift.data import Pipeline, Rows, StandardLibrary, TokenizerFile

ROW, BATCH = 256, 8
SIDE, CROP = 192, 96
RATE = 16_000


@dataclass(frozen=True)
class Case:
    """One pipeline.

    Attributes:
        name: name of the case.
        pipeline: pipeline as it is written, up to batches.
        plain: the same in Grain: endless samples before batches, of a source and a seed.
        num_records: records of the source.
    """

    name: str
    pipeline: Pipeline
    plain: Callable[[int], grain.MapDataset | grain.IterDataset]
    num_records: int


def texts(num_records: int, directory: Path) -> Case:
    """Makes compressed documents: decompress, tokenize with a trained BPE, leave out other languages, pack."""
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

    def plain(num_threads: int) -> grain.IterDataset:
        made = (
            grain.MapDataset.source(records)
            .map(lambda one: {**one, **unpack(one)})
            .map(lambda one: one | to_tokens(one))
        )
        kept = made.filter(is_english).map(lambda one: {"tokens": one["tokens"]}).repeat()
        read = kept.to_iter_dataset(_options(num_threads))
        return grain.experimental.ConcatThenSplitIterDataset(read, length_struct={"tokens": ROW + 1})

    return Case("text", pipeline, plain, num_records)


def images(num_records: int) -> Case:
    """Makes pictures: decode, float, scale the colours, crop at random, mirror at random."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(num_records):
        small = Image.fromarray(rng.integers(0, 255, (SIDE // 8, SIDE // 8, 3), np.uint8).astype(np.uint8))
        file = io.BytesIO()
        small.resize((SIDE, SIDE)).save(file, "JPEG", quality=90)
        records.append({"file": file.getvalue()})
    mean, deviation = np.float32([0.48, 0.46, 0.41]), np.float32([0.23, 0.22, 0.22])

    def decode(sample: Any) -> dict[str, Any]:
        return {"image": np.asarray(Image.open(io.BytesIO(sample["file"])))}

    def scale(sample: Any) -> dict[str, Any]:
        return {"image": (sample["image"].astype(np.float32) / np.float32(255) - mean) / deviation}

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

    def plain(num_threads: int) -> grain.IterDataset:
        made = grain.MapDataset.source(records).seed(0).shuffle().repeat().map(decode).map(scale)
        changed = made.random_map(lambda one, rng: crop(one, rng)).random_map(lambda one, rng: mirror(one, rng))
        return changed.to_iter_dataset(_options(num_threads))

    return Case("images", pipeline, plain, num_records)


def sounds(num_records: int) -> Case:
    """Makes sounds: decode, resample, spectrogram, mask frequencies at random."""
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
        found = scipy.signal.stft(sample["sound"], nperseg=256)[2]
        return {"sound": np.log1p(np.abs(found)).astype(np.float32)}

    def mask(sample: Any, draw: np.random.Generator) -> dict[str, Any]:
        kept = sample["sound"].copy()
        first = int(draw.integers(0, 100))
        kept[first : first + 20] = 0
        return {"sound": kept}

    field = {"reads": ("sound",), "writes": ("sound",)}
    read = Pipeline(Rows(records)).map(decode, reads=("file",)).map(resample, **field).map(spectrum, **field)
    pipeline = read.map(mask, **field, is_random=True).shuffle().batch(BATCH)

    def plain(num_threads: int) -> grain.IterDataset:
        made = grain.MapDataset.source(records).seed(0).shuffle().repeat().map(decode).map(resample).map(spectrum)
        return made.random_map(lambda one, rng: mask(one, rng)).to_iter_dataset(_options(num_threads))

    return Case("audio", pipeline, plain, num_records)


def _options(num_threads: int) -> grain.ReadOptions:
    """Options of Grain's reading: its threads; none makes samples when they are asked for."""
    return grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=0 if num_threads == 0 else 64)


def cases(scale: float, directory: Path) -> Sequence[Case]:
    """Makes all three, with so many of their records."""
    return [texts(round(600 * scale), directory), images(round(600 * scale)), sounds(round(600 * scale))]
