"""Tokenization of a corpus: reads every document in a pipeline once, with the plan predicted to be fastest."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from swift.data.config import DataConfig, Split, cut_at, in_split, weighs
from swift.data.operators import Map, Sample
from swift.data.pipeline import CachePoint, InputPlan, Pipeline, plain_plan
from swift.data.records import ChosenRecords, Documents, RecordSource
from swift.data.remote_records import ConnectHosts, InputHosts
from swift.data.sources import DataError, DocumentError, Text, TextSource, TokenFile, domain_of
from swift.data.survey import survey
from swift.data.tokenizer import Tokenizer
from swift.errors import SettingError, first_line

AddTokens = Callable[[Split, str, np.ndarray, np.ndarray | None], None]
"""Takes a document's split, its domain, its tokens and their losses' weights, None if the data have none."""
PlanReading = Callable[[Pipeline, InputHosts | None], InputPlan]
"""Plans a single pass over a pipeline with the connected input hosts; one reason begins with ``offload: ``."""
_FEW = 1000
"""Number of records below which no plan is made: planning would take longer than reading them."""


@dataclass(frozen=True)
class DocumentTokens:
    """The last operator of a training pipeline: replaces a document with its tokens, without a separator.

    If the documents have weights, the sample keeps them, as float32.

    Args:
        tokenizer: tokenizer of the field ``text``; a field ``tokens`` is used as it is.
        domain: field that names the document's domain, which is kept in the sample; None for no such field.
        is_text_source: whether the documents come from a ``TextSource``; errors then name the document rather than
            this operator, which the user did not write.
        has_weights: whether the field ``weights`` has the weights of the tokens' losses.
    """

    tokenizer: Tokenizer
    domain: str | None = None
    is_text_source: bool = False
    has_weights: bool = False

    def __call__(self, sample: Sample) -> Sample:
        """Returns the tokens, in the smallest unsigned type.

        Raises:
            DataError: the text or the domain field is missing, a token is outside the vocabulary, or the weights are
                not one number from 0 for each token.
            DocumentError: a document of a ``TextSource`` has a token outside the vocabulary.
        """
        content = sample.get("tokens") if sample.get("tokens") is not None else sample.get("text")
        if content is None:
            empty = next((name for name in ("text", "tokens") if name in sample), None)
            if empty is not None:
                raise DataError(f"the field {empty!r} of a document is null: leave it out with a Filter, or make it ''")
            raise DataError(f"a document has no field 'text' or 'tokens', but {', '.join(sample) or 'none'}")
        try:
            document = {"tokens": tokens_of(content, self.tokenizer, str(sample.get("name", "the document")))}
        except DataError as error:
            if self.is_text_source:
                raise DocumentError(str(error)) from error
            raise
        if self.has_weights:
            document["weights"] = _weights_of(sample["weights"], len(document["tokens"]))
        if self.domain is None:
            return document
        if self.domain not in sample:
            raise DataError(f"a document has no field {self.domain!r}, see DataConfig.domain, but {', '.join(sample)}")
        return document | {self.domain: str(sample[self.domain])}


def tokens_of(content: Text, tokenizer: Tokenizer, name: str) -> np.ndarray:
    """Returns the tokens of a document, in the smallest unsigned type.

    Raises:
        DataError: the document is neither a text nor tokens, or has a token outside the vocabulary.
    """
    try:
        tokens = tokenizer.encode(content) if isinstance(content, str) else np.asarray(content)
    except UnicodeEncodeError as error:  # JSON's \u escapes can write half of a surrogate pair
        raise DataError(
            f"{name} has letter {error.start + 1}, {content[error.start]!r}, which is no character"
        ) from error
    except ValueError as error:  # NumPy makes no array of nested lists of unequal lengths
        raise DataError(f"{name} is neither a text nor a list of tokens: {first_line(error)}") from error
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        kind = f"a {type(content).__name__}" if tokens.ndim == 0 else f"an array of {tokens.dtype}{list(tokens.shape)}"
        raise DataError(f"{name} is neither a text nor a list of whole numbers, but {kind}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
        how = "set DataConfig.tokenizer to the one that wrote it"
        raise DataError(f"{name} holds a token that is not from 0 to {tokenizer.vocab_size - 1}: {how}")
    return tokens.astype(np.min_scalar_type(tokenizer.vocab_size - 1), copy=False)


def _weights_of(content: Any, num_tokens: int) -> np.ndarray:
    """Returns the weights of a document's tokens, float32[num_tokens]."""
    try:
        weights = np.asarray(content, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"the weights of a document are not numbers: {first_line(error)}") from error
    if weights.shape != (num_tokens,):
        raise DataError(f"a document has {num_tokens} tokens and weights of shape {list(weights.shape)}")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise DataError("a document has a weight that is not a number from 0")
    return weights


def _add_document(
    config: DataConfig,
    tokens: np.ndarray,
    weights: np.ndarray | None,
    split: Split | None,
    domain: str,
    add: AddTokens,
) -> None:
    """Adds the tokens of a document, then a separator; an empty document adds nothing.

    The separator's loss has the weight 0 if the document has weights, since nobody has asked to learn it. Such a
    document gets no separator if it ends with one, as a chat may.

    Args:
        config: data settings.
        tokens: tokens, see ``tokens_of``.
        weights: weights of the tokens' losses; None if the document has none, which is 1 for each.
        split: split that the document belongs to; None to divide it between both, each part with a separator.
        domain: domain of the document.
        add: takes the split, the domain and the tokens of each part.
    """
    if not len(tokens):
        return
    cut, separator = cut_at(len(tokens), config.validation_share), config.separator
    halves: list[tuple[Split, slice]] = [("train", slice(cut)), ("validation", slice(cut, None))]
    for side, part in halves if split is None else [(split, slice(None))]:
        ends = [] if weights is not None and tokens[part][-1] == separator else [separator]
        of_tokens, of_ends = None, None
        if config.weighs_tokens:
            of_tokens = np.ones(len(tokens[part]), np.float32) if weights is None else weights[part]
            of_ends = np.full(len(ends), weights is None, np.float32)
        add(side, domain, tokens[part], of_tokens)
        add(side, domain, np.array(ends, tokens.dtype), of_ends)


class Corpus(NamedTuple):
    """A document pipeline and the splits that it serves; if it serves both, the hash of a document's name decides."""

    pipeline: Pipeline
    splits: tuple[Split, ...]

    @property
    def has_operators(self) -> bool:
        """Whether the user's pipeline has operators, besides the final tokenization."""
        return len(self.pipeline.operators) > 1


def corpora_of(config: DataConfig) -> list[Corpus]:
    """Returns the configured pipelines, each extended by tokenization; a ``TextSource`` has no other operator."""
    pipelines = [_to_tokens(source, config) for source in config.sources]
    if len(pipelines) == 1:
        return [Corpus(pipelines[0], ("train", "validation"))]
    return [Corpus(pipelines[0], ("train",)), Corpus(pipelines[1], ("validation",))]


def _to_tokens(source: Any, config: DataConfig) -> Pipeline:
    is_text_source = isinstance(source, TextSource)
    pipeline = Pipeline(Documents(source)) if is_text_source else source
    if not isinstance(pipeline, Pipeline):
        raise SettingError("DataConfig.source", source, "must be a pipeline or texts: other data are read as they are")
    to_tokens = DocumentTokens(config.tokenizer, config.domain, is_text_source, weighs(source))
    return pipeline.then(Map(to_tokens, name="tokenize the documents"))


def training_pipelines(config: DataConfig) -> tuple[Pipeline, ...]:
    """Returns the pipelines that read and tokenize the training documents, one for each source.

    The token files of a mixture are left out, since their tokens are read without a pipeline.

    Raises:
        SettingError: no source has documents that can be read in any order.
    """
    components = [c for c in config.components if not isinstance(c.source, TokenFile)] or config.components
    return tuple(corpora_of(replace(c, validation_source=None))[0].pipeline for c in components)


def _sides(config: DataConfig, corpus: Corpus) -> list[Split | None]:
    """Returns each record's split, or None for the only record of a source, which is divided between both splits."""
    source = corpus.pipeline.source
    if len(corpus.splits) == 1:
        return [corpus.splits[0]] * len(source)
    if len(source) == 1:
        return [None]
    trains = in_split(map(source.name, range(len(source))), "train", config.validation_share)
    return ["train" if is_train else "validation" for is_train in trains]


class _Splitter:
    """A ``Store`` for ``survey`` that stores nothing, but passes the tokens of each document on to its split."""

    def __init__(self, config: DataConfig, source: RecordSource, sides: Sequence[Split | None], add: AddTokens):
        self._config, self._source, self._sides, self._add = config, source, sides, add

    @staticmethod
    def form(sample: Sample) -> Sample:
        return sample

    def add(self, number: int, sample: Any) -> None:
        field = self._config.domain
        domain = domain_of(self._source.name(number)) if field is None else sample[field]
        side, weights = self._sides[number], sample.get("weights") if self._config.weighs_tokens else None
        _add_document(self._config, sample["tokens"], weights, side, domain, self._add)

    def closed(self) -> Any:
        return None


def plain_reading(pipeline: Pipeline, hosts: InputHosts | None) -> InputPlan:
    """Plans to read a pipeline as it is written, on this machine; a ``PlanReading`` that uses no optimizer."""
    del hosts
    return replace(plain_plan(pipeline), reasons=("offload: none; the pipeline is read as it is written",))


def pipeline_tokens(
    config: DataConfig,
    add: AddTokens,
    report: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    split: Split | None = None,
    connect: ConnectHosts | None = None,
    plan: PlanReading = plain_reading,
) -> None:
    """Reads and tokenizes the documents from texts or pipelines once, in the order of the source.

    Args:
        config: data settings, with texts or pipelines as sources.
        add: takes the tokens of each document that is not empty, and then a separator.
        report: called with the number of records done and the total number of records.
        say: called with a line about the input hosts, or about a skipped record.
        split: split that is needed, or None for both; documents of the other split are not read unless an operator has
            to see them.
        connect: connects to input hosts, which run the first operators of the training pipeline if that is faster; None
            for no hosts.
        plan: plans the reading, if there are enough records to make planning worthwhile.

    Raises:
        SettingError: a source has no records, or a host has different data or operators than this machine.
        DataError: a record cannot be read, or an operator raises.
    """
    for corpus in corpora_of(config):
        if split is not None and split not in corpus.splits:
            continue
        if not len(corpus.pipeline.source):
            raise SettingError("Pipeline.source", corpus.pipeline.source, "has no records: there is nothing to read")
        is_begun = connect is not None and "train" in corpus.splits
        with connect(corpus.pipeline, say) if connect is not None and is_begun else nullcontext() as hosts:
            # If no host could be reached, ``connect`` has already told the user why.
            is_helped = hosts is not None and hosts.num_workers > 0
            reading, sides = _planned(corpus, hosts, plan), _sides(config, corpus)
            if is_helped:
                say(next(line for line in reading.reasons if line.startswith("offload: ")))
            # Operators such as DropDuplicates need all records, so only a pipeline without operators may skip a split.
            if split is not None and not corpus.has_operators:
                reading, sides = _only(split, reading, sides)
            findings = survey(reading, _Splitter(config, reading.pipeline.source, sides, add), report, hosts)
        for line in findings.skipped:
            say(f"skipped: {line}")


def _only(split: Split, plan: InputPlan, sides: Sequence[Split | None]) -> tuple[InputPlan, list[Split | None]]:
    """Restricts a plan to the documents of a split."""
    chosen = [number for number, side in enumerate(sides) if side in (split, None)]
    source = ChosenRecords(plan.pipeline.source, chosen)
    return replace(plan, pipeline=replace(plan.pipeline, source=source)), [sides[number] for number in chosen]


def tokens_plan(pipeline: Pipeline) -> InputPlan:
    """Returns the plain plan with a cache after its last operator; its survey digest determines the index's name."""
    return replace(plain_plan(pipeline), cache=CachePoint(len(pipeline.levels[0].elements), "disk"))


def _planned(corpus: Corpus, hosts: InputHosts | None, plan: PlanReading) -> InputPlan:
    pipeline = corpus.pipeline
    # A text source may be a user-defined class that cannot be pickled, so it never runs in other processes.
    is_plain = hosts is None and isinstance(pipeline.source, Documents) and not corpus.has_operators
    if is_plain or len(pipeline.source) < _FEW:
        return replace(tokens_plan(pipeline), reasons=("offload: none; there are few records",))
    return replace(plan(pipeline, hosts), cache=tokens_plan(pipeline).cache)
