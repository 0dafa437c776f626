"""Settings of the data, and the assignment of documents to training and validation."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from swift.data.sources import StandardLibrary, TextSource, TokenFile
from swift.data.tokenizer import ByteTokenizer, Tokenizer
from swift.errors import SettingError

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data: documents, their tokens, and the share of documents for validation.

    Args:
        source: source of the documents.
        tokenizer: tokenizer of texts; a ``TokenFile`` has tokens already, and needs it only to decode them.
        validation_share: expected share of the documents used for validation, between 0 and 1.

    Raises:
        SettingError: ``validation_share`` is not between 0 and 1.
    """

    source: TextSource | TokenFile = field(default_factory=StandardLibrary)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    validation_share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            allowed = "must be more than 0 and less than 1"
            raise SettingError("DataConfig.validation_share", self.validation_share, allowed)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest token allowed."""
        if isinstance(self.source, TokenFile) and self.source.vocab_size is not None:
            return self.source.vocab_size
        return self.tokenizer.vocab_size


def in_split(names: Iterable[str], split: Split, validation_share: float) -> np.ndarray:
    """Selects the documents of a split, bool[num_documents].

    The hash of a document's name decides, so a document stays in its split whatever else the corpus holds, on every
    machine.

    Args:
        names: names of the documents.
        split: split to select.
        validation_share: expected share of the documents used for validation.

    Raises:
        SettingError: a split would be empty.
    """
    places = np.array([_hash_to_unit(name) for name in names])
    validates = places < validation_share
    if len(places) == 1:
        allowed = "the data are a single document, which cannot be split in two: give more documents"
        raise SettingError("DataConfig.validation_share", validation_share, allowed)
    if not validates.any() or validates.all():
        side, bound = ("train", f"less than {places.max():.6f}")
        if not validates.any():
            side, bound = ("validation", f"more than {places.min():.6f}")
        allowed = f"leaves none of {len(places)} documents for {side}: use {bound}, or more documents"
        raise SettingError("DataConfig.validation_share", validation_share, allowed)
    return validates if split == "validation" else ~validates


def _hash_to_unit(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
