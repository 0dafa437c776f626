"""Data settings, and the split of documents into training and validation."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from swift.data.operators import Chat, Pack, Shuffle, Stack, Tokenize, name_of
from swift.data.pipeline import Pipeline
from swift.data.sources import StandardLibrary, StreamSource, TextSource, TokenFile
from swift.data.tokenizer import ByteTokenizer, Tokenizer
from swift.errors import SettingError

Split = Literal["train", "validation"]
_KINDS = (TokenFile, StreamSource, Pipeline)


@dataclass(frozen=True)
class Mixture:
    """Several sources, mixed by weight within every batch; an exhausted source starts over.

    Args:
        sources: texts, token files and pipelines.
        weights: weight of each source, above 0. A source's share of the sequences is its weight divided by the sum of
            the weights. Every batch (with ``DataConfig.locality``, every stretch of 64 batches) has these shares as
            closely as whole sequences allow. Validation evaluates each source, and weights their losses the same.
        names: name of each source in the record, such as ``web``; None for numbers from 0.

    Raises:
        SettingError: a source has no weight above 0, is a stream or a mixture, or has no name of its own.
    """

    sources: tuple[TextSource | TokenFile | Pipeline, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("sources", "weights"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # gin also passes lists
        if not self.sources or any(isinstance(source, Mixture | StreamSource) for source in self.sources):
            raise SettingError("Mixture.sources", self.sources, "must be texts, token files or pipelines")
        if len(self.weights) != len(self.sources):
            allowed = f"must be as many as Mixture.sources, {len(self.sources)}"
            raise SettingError("Mixture.weights", self.weights, allowed)
        for weight in self.weights:
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not (is_number and 0 < weight < float("inf")):
                raise SettingError(
                    "Mixture.weights", self.weights, "must be numbers above 0: leave out a source without one"
                )
        if self.names is not None:
            object.__setattr__(self, "names", tuple(self.names))
            are_words = all(isinstance(name, str) and re.fullmatch(r"[\w.-]{1,40}", name) for name in self.names)
            if not (are_words and len(set(self.names)) == len(self.names) == len(self.sources)):
                allowed = f"must be {len(self.sources)} different names of letters, digits, '_', '.' and '-'"
                raise SettingError("Mixture.names", self.names, allowed)

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each source in the record."""
        return self.names or tuple(map(str, range(len(self.sources))))


@dataclass(frozen=True)
class DataConfig:
    """Data settings: where documents come from, how they are tokenized, and which are held out for validation.

    Args:
        source: source of the documents; a pipeline's samples must have a field ``text``, or a field ``tokens`` without
            a separator. If an operator declares that it writes ``weights``, these are the weights of the tokens'
            losses.
        tokenizer: tokenizer of the texts; with a ``TokenFile`` it is only used to decode.
        validation_share: expected share of the documents held out for validation, between 0 and 1. Each split gets at
            least one document; a single document is cut in two, and its end is used for validation. A ``StreamSource``
            does its own splitting.
        validation_source: separate source of the validation documents, of the same kind as ``source``. If it is set,
            all of ``source`` is used for training. None to hold out ``validation_share`` of ``source``.
        locality: share of the training sequences that are grouped by domain, from 0 (random order) to 1 (the sequences
            of a domain follow each other within 64 batches). In a mixture, each source is a domain.
        domain: field of a pipeline's samples that names a document's domain; None to use the document's directory, or
            the record's file, as its domain.

    Raises:
        SettingError: ``validation_share`` or ``locality`` is not between 0 and 1, the two sources are of different
            kinds, or ``locality`` is set and the documents have no domains.
    """

    source: TextSource | TokenFile | StreamSource | Pipeline | Mixture = field(default_factory=StandardLibrary)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    validation_share: float = 0.05
    validation_source: TextSource | TokenFile | StreamSource | Pipeline | None = None
    locality: float = 0.0
    domain: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.validation_source, Mixture) or (isinstance(self.source, Mixture) and len(self.sources) > 1):
            allowed = "cannot be set with a mixture: a share of each of its sources is for validation"
            raise SettingError("DataConfig.validation_source", self.validation_source, allowed)
        kinds = {tuple(isinstance(source, kind) for kind in _KINDS) for source in self.sources}
        if len(kinds) > 1:
            allowed = "must be of the same kind as DataConfig.source: a token file, texts, a stream, or a pipeline"
            raise SettingError("DataConfig.validation_source", self.validation_source, allowed)
        if not 0 < self.validation_share < 1:
            allowed = "must be more than 0 and less than 1"
            raise SettingError("DataConfig.validation_share", self.validation_share, allowed)
        for name, source in zip(("source", "validation_source"), self.sources, strict=False):
            if isinstance(source, Pipeline):
                _check_pipeline(f"DataConfig.{name}", source, self.tokenizer)
        self._check_locality()

    def _check_locality(self) -> None:
        is_number = isinstance(self.locality, int | float) and not isinstance(self.locality, bool)
        if not (is_number and 0 <= self.locality <= 1):
            raise SettingError("DataConfig.locality", self.locality, "must be a number from 0 to 1")
        if self.locality and isinstance(self.source, TokenFile | StreamSource):
            allowed = f"must be 0 with a {type(self.source).__name__}: its documents have no domains; a mixture's do"
            raise SettingError("DataConfig.locality", self.locality, allowed)
        if self.domain is not None and not isinstance(self.source, Pipeline):
            allowed = "must be None unless DataConfig.source is a pipeline: it names a field of its samples"
            raise SettingError("DataConfig.domain", self.domain, allowed)

    @property
    def components(self) -> tuple["DataConfig", ...]:
        """One configuration for each source of a mixture; only this configuration if the source is not a mixture."""
        if not isinstance(self.source, Mixture):
            return (self,)
        return tuple(replace(self, source=source, locality=0.0) for source in self.source.sources)

    @property
    def sources(self) -> tuple[TextSource | TokenFile | StreamSource | Pipeline | Mixture, ...]:
        """The source of both splits, or the training source followed by the validation source."""
        return (self.source,) if self.validation_source is None else (self.source, self.validation_source)

    def source_of(self, split: Split) -> TextSource | TokenFile | StreamSource | Pipeline | Mixture:
        """Returns the source that holds the documents of a split."""
        return self.sources[-1 if split == "validation" else 0]

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest token allowed."""
        if isinstance(self.source, Mixture):
            return max(component.vocab_size for component in self.components)
        if isinstance(self.source, TokenFile) and self.source.vocab_size is not None:
            return self.source.vocab_size
        return self.tokenizer.vocab_size

    @property
    def weighs_tokens(self) -> bool:
        """Whether each token's loss has a weight, see ``weighs``."""
        return any(weighs(source) for component in self.components for source in component.sources)

    @property
    def chats(self) -> tuple[Chat, ...]:
        """The operators of all pipelines that turn chats into tokens."""
        sources = [source for component in self.components for source in component.sources]
        operators = [operator for source in sources if isinstance(source, Pipeline) for operator in source.operators]
        return tuple(operator for operator in operators if isinstance(operator, Chat))

    @property
    def separator(self) -> int:
        """The token that ends a document.

        Raises:
            SettingError: the source is a ``TokenFile`` without ``end_of_document``, or sources end their documents with
                different tokens.
        """
        if isinstance(self.source, TokenFile):
            if self.source.end_of_document is None:
                raise SettingError("TokenFile.end_of_document", None, "must be known where documents are separated")
            return self.source.end_of_document
        parts = self.components if isinstance(self.source, Mixture) else self.chats
        separators = {part.separator for part in parts} or {self.tokenizer.separator}
        if len(separators) > 1:
            allowed = "must end their documents with the same token where documents are separated"
            raise SettingError("DataConfig.source", self.source, allowed)
        return separators.pop()


def weighs(source: object) -> bool:
    """Whether the documents of a source have a weight for every token's loss: an operator writes ``weights``."""
    operators = source.operators if isinstance(source, Pipeline) else ()
    return any("weights" in (getattr(operator, "writes", None) or ()) for operator in operators)


def _check_pipeline(setting: str, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """Rejects operators that the run itself applies, and random ones, because the index would freeze their outcome."""
    for operator in pipeline.operators:
        if isinstance(operator, Chat) and operator.tokenizer != tokenizer:
            raise SettingError("Chat.tokenizer", operator.tokenizer, f"must be DataConfig.tokenizer, {tokenizer!r}")
        if isinstance(operator, Tokenize | Pack | Shuffle | Stack):
            text = (
                "is not for a pipeline that trains: the run itself tokenizes, packs, shuffles and batches its documents"
            )
            raise SettingError(setting, name_of(operator), text)
        if operator.is_random:
            text = "is random, and the tokens of a pipeline that trains are kept: they would be the same in every epoch"
            raise SettingError(setting, name_of(operator), text)


def in_split(names: Iterable[str], split: Split, validation_share: float) -> np.ndarray:
    """Returns a mask of the documents that belong to a split, bool[num_documents].

    The hash of a document's name decides, so a document is in the same split on every machine, regardless of the rest
    of the corpus. A split that would be empty gets the document whose hash is closest to the threshold.

    Args:
        names: names of at least two documents.
        split: split to select.
        validation_share: expected share of the documents held out for validation.
    """
    places = split_places(names)
    validates = places < validation_share
    assert len(places) > 1, "a single document is cut, see cut_at"
    validates[places.argmin()], validates[places.argmax()] = True, False
    return validates if split == "validation" else ~validates


def split_places(names: Iterable[str]) -> np.ndarray:
    """Hashes each name to a number from 0 to 1; documents below ``validation_share`` are used for validation."""
    return np.fromiter(map(_hash_to_unit, names), float)


def cut_at(num_tokens: int, validation_share: float) -> int:
    """Returns where to cut a single document: tokens before this position are for training, the rest for validation."""
    return num_tokens - min(max(1, round(num_tokens * validation_share)), num_tokens - 1)


def _hash_to_unit(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
