"""The documents of a pipeline as tokens: what a run reads of it, once, in the plan that is predicted to be fastest."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from swift.data.config import DataConfig, Split, cut_at, in_split
from swift.data.files import BeyondVocabulary, DataError
from swift.data.locality import domain_of
from swift.data.pipeline import (
    CachePoint,
    InputPlan,
    Map,
    Pipeline,
    Resources,
    Sample,
    decoded,
    plain_plan,
    plan_input,
    survey,
)
from swift.data.records import Documents
from swift.data.sources import Text, TextSource
from swift.data.tokenizer import Tokenizer
from swift.errors import SettingError

AddTokens = Callable[[Split, str, np.ndarray], None]
"""Takes tokens: their split, the domain of their document, and themselves."""
_AHEAD = 64
"""Documents that are ready before they are written to the index."""
_FEW = 1000
"""Records of which no plan is made: it would take longer than they do."""


@dataclass(frozen=True)
class DocumentTokens:
    """The last operator of a pipeline that trains: the tokens of a document, without a separator.

    Args:
        tokenizer: tokenizer of a ``text``; ``tokens`` stay what they are.
        domain: field that names the domain of the document, which stays, too; None: none.
    """

    tokenizer: Tokenizer
    domain: str | None = None

    def __call__(self, sample: Sample) -> Sample:
        """Returns the tokens, in the smallest unsigned type.

        Raises:
            BeyondVocabulary: a token is outside the vocabulary.
            DataError: there is no text, or no such field.
        """
        given = sample["tokens"] if "tokens" in sample else sample.get("text")
        if given is None:
            raise BeyondVocabulary(f"a document has no field 'text' or 'tokens', but {', '.join(sample) or 'none'}")
        made = {"tokens": tokens_of(given, self.tokenizer, "the document")}
        if self.domain is None:
            return made
        if self.domain not in sample:
            raise DataError(f"a document has no field {self.domain!r}, see DataConfig.domain, but {', '.join(sample)}")
        return made | {self.domain: str(sample[self.domain])}


def tokens_of(given: Text, tokenizer: Tokenizer, name: str) -> np.ndarray:
    """Returns the tokens of a document, in the smallest unsigned type.

    Raises:
        BeyondVocabulary: the document is of tokens already, and one is outside the vocabulary.
    """
    tokens = tokenizer.encode(given) if isinstance(given, str) else np.asarray(given)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
        raise BeyondVocabulary(f"{name} holds a token that is not from 0 to {tokenizer.vocab_size - 1}")
    return tokens.astype(np.min_scalar_type(tokenizer.vocab_size - 1), copy=False)


def add_document(config: DataConfig, tokens: np.ndarray, split: Split | None, domain: str, add: AddTokens) -> None:
    """Adds the tokens of a document that is not empty, then its separator.

    Args:
        config: settings of the data.
        tokens: tokens, see ``tokens_of``.
        split: split that the document belongs to; None: it is cut, and each part has a separator.
        domain: domain of the document.
        add: takes the split, the domain and the tokens of each part.
    """
    if not len(tokens):
        return
    cut, separator_1 = (
        cut_at(len(tokens), config.validation_share),
        np.array([config.tokenizer.separator], tokens.dtype),
    )
    halves: list[tuple[Split, np.ndarray]] = [("train", tokens[:cut]), ("validation", tokens[cut:])]
    for side, part in halves if split is None else [(split, tokens)]:
        add(side, domain, part)
        add(side, domain, separator_1)


class Corpus(NamedTuple):
    """Documents of one split, or of both, for which places decide."""

    pipeline: Pipeline
    splits: tuple[Split, ...]


def corpora_of(config: DataConfig) -> list[Corpus]:
    """Returns the pipelines of a configuration, to the tokens of a document."""
    tokens = Map(DocumentTokens(config.tokenizer, config.domain), name="tokenize the documents")
    pipelines = [source.then(tokens) for source in config.sources if isinstance(source, Pipeline)]
    if len(pipelines) == 1:
        return [Corpus(pipelines[0], ("train", "validation"))]
    return [Corpus(pipelines[0], ("train",)), Corpus(pipelines[1], ("validation",))]


def reading(config: DataConfig) -> Pipeline:
    """Returns the pipeline by which a run reads its documents for training, to their tokens.

    Raises:
        SettingError: the source does not have documents that can be read in any order.
    """
    source = config.source
    if isinstance(source, TextSource):
        source = Pipeline(Documents(source))
    if not isinstance(source, Pipeline):
        raise SettingError("DataConfig.source", source, "must be a pipeline or texts: other data are read as they are")
    return corpora_of(replace(config, source=source, validation_source=None))[0].pipeline


class _Splitter:
    """Sends the tokens of each document to its split; a place to keep samples, see ``survey``."""

    def __init__(self, config: DataConfig, corpus: Corpus, add: AddTokens):
        self._config, self._add, self._source = config, add, corpus.pipeline.source
        self._splits: list[Split | None] = [corpus.splits[0]] * len(self._source)
        if len(corpus.splits) > 1 and len(self._source) > 1:
            names = map(self._source.name, range(len(self._source)))
            trains = in_split(names, "train", config.validation_share)
            self._splits = ["train" if one else "validation" for one in trains]
        elif len(corpus.splits) > 1:
            self._splits = [None] * len(self._source)  # a single document is cut

    def add(self, number: int, content: bytes) -> None:
        sample, field = decoded(content), self._config.domain
        domain = domain_of(self._source.name(number)) if field is None else sample[field]
        add_document(self._config, sample["tokens"], self._splits[number], domain, self._add)

    def closed(self) -> Any:
        return None


def pipeline_tokens(config: DataConfig, add: AddTokens, report: Callable[[int, int], None] | None = None) -> list[str]:
    """Reads the documents of a configuration's pipelines once, in their order.

    Args:
        config: settings of the data, whose sources are pipelines.
        add: takes the tokens of each document that is not empty, and then a separator.
        report: called with the number of records that are done, and that of all.

    Returns:
        A line for each record that was skipped.

    Raises:
        SettingError: a source has no records.
        DataError: a record cannot be read, or an operator raises.
    """
    skipped = list[str]()
    for corpus in corpora_of(config):
        if not len(corpus.pipeline.source):
            raise SettingError("Pipeline.source", corpus.pipeline.source, "has no records: there is nothing to read")
        plan = _plan(corpus.pipeline)
        found = survey(plan, _Splitter(config, corpus, add), report)
        skipped += [f"skipped: {line}" for line in found.skipped]
    return skipped


def tokens_plan(pipeline: Pipeline) -> InputPlan:
    """Returns the plain plan that keeps every document: what it keeps decides what an index of it is."""
    return replace(plain_plan(pipeline), cache=CachePoint(len(pipeline.levels[0].elements), "disk"))


def _plan(pipeline: Pipeline) -> InputPlan:
    if len(pipeline.source) < _FEW:
        return tokens_plan(pipeline)
    # Each record is read once, and what the operators make of it is kept by the index.
    once = Resources(num_epochs=1, num_cores=os.cpu_count() or 1, memory_bytes=0)
    return replace(plan_input(pipeline, once), cache=tokens_plan(pipeline).cache, num_ahead=_AHEAD)
