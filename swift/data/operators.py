"""Operators of an input pipeline: their declarations, and how they are applied to a sample.

A sample is a mapping of fields. An operator that declares the fields it reads is given only these, and one that
declares the fields it writes must return exactly these, so these declarations cannot be wrong. A declaration by
``depends_on`` can be wrong; ``swift.data.sample_checks`` tests it on some samples.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from swift.data.sources import DataError, DocumentError
from swift.data.tokenizer import Tokenizer, TokenizerFile
from swift.errors import SettingError, check_count, error_line

if TYPE_CHECKING:
    from swift.data.chat import ChatTemplate

Sample = Mapping[str, Any]
"""The fields of a sample by name: text, bytes, numbers, arrays."""

Draw = Callable[[int], np.random.Generator]
"""Creates an operator's random generator for one sample, from the operator's number in the pipeline."""
Apply = Callable[[Sample, Draw], Sample | None]


def _check_fields(setting: str, fields: tuple[str, ...] | None) -> None:
    is_named = isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)
    if fields is not None and not is_named:
        raise SettingError(setting, fields, "must be a tuple of names, such as ('text',), or None")


@dataclass(frozen=True)
class Map:
    """An operator that applies a function to each sample.

    Args:
        function: takes a sample and returns fields; if ``is_random``, it also takes a ``numpy.random.Generator``.
        reads: fields that the function is given; None for all.
        writes: fields that the function returns, to be set in the sample; None if it returns the whole new sample.
        depends_on: names of the earlier operators that must run before this one. All other earlier ones may be moved
            after it, even if they write fields that it reads or writes. None to decide by the fields.
        is_random: whether the function takes a generator, which is seeded only by the seed, the epoch, the sample's
            number and the operator.
        is_fixed: whether no other operator may move past this one.
        name: name for ``depends_on``, messages and profiles; "" for the name of the function.
    """

    function: Callable[..., Sample]
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    depends_on: tuple[str, ...] | None = None
    is_random: bool = False
    is_fixed: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingError("Map.function", self.function, "must be a function of a sample")
        for setting in ("reads", "writes", "depends_on"):
            _check_fields(f"Map.{setting}", getattr(self, setting))


@dataclass(frozen=True)
class Filter:
    """An operator that keeps the samples for which a function returns true.

    Args:
        function: takes a sample and returns whether to keep it.
        reads: fields that the function is given; None for all.
        depends_on: see ``Map``.
        is_fixed: whether no other operator may move past this one.
        name: see ``Map``.
    """

    function: Callable[[Sample], bool]
    reads: tuple[str, ...] | None = None
    depends_on: tuple[str, ...] | None = None
    is_fixed: bool = False
    name: str = ""
    writes: ClassVar[tuple[str, ...]] = ()
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingError("Filter.function", self.function, "must be a function of a sample")
        for setting in ("reads", "depends_on"):
            _check_fields(f"Filter.{setting}", getattr(self, setting))


@dataclass(frozen=True)
class DropDuplicates:
    """An operator that drops each sample whose field equals the field of an earlier sample, in the source's order.

    Args:
        field: field to compare, by a digest of 16 bytes.
        name: see ``Map``.
    """

    field: str = "text"
    name: str = "drop_duplicates"
    writes: ClassVar[tuple[str, ...]] = ()
    depends_on: ClassVar[None] = None
    is_random: ClassVar[bool] = False
    is_fixed: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The field that is compared."""
        return (self.field,)


@dataclass(frozen=True)
class Tokenize:
    """An operator that adds the tokens of a text, with a separator at the end, as the field ``tokens``.

    Args:
        tokenizer: tokenizer of the text.
        field: field that holds the text.
        name: see ``Map``.
    """

    tokenizer: Tokenizer
    field: str = "text"
    name: str = "tokenize"
    writes: ClassVar[tuple[str, ...]] = ("tokens",)
    depends_on: ClassVar[None] = None
    is_random: ClassVar[bool] = False
    is_fixed: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The field that holds the text."""
        return (self.field,)

    def function(self, sample: Sample) -> Sample:
        """Returns the tokens in the smallest unsigned type, with a separator unless the text is empty."""
        tokens = self.tokenizer.encode(sample[self.field])
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        ends = [self.tokenizer.separator] if len(tokens) else []
        return {"tokens": np.concatenate([tokens, ends]).astype(dtype)}


@dataclass(frozen=True)
class Chat:
    """An operator that turns a chat into ``tokens`` and ``weights``: 1 for the answers with their ends, 0 elsewhere.

    The chat template is ``chat_template.jinja`` in the directory of the tokenizer's file, or the one in
    ``tokenizer_config.json``. Needs the extra ``tokenizers``.

    Args:
        tokenizer: tokenizer of the chats, the run's own in training.
        field: field that holds the messages: a list of mappings with a ``role`` and a ``content``.
        end_of_document: token that separates chats in a sequence, which no chat may contain, such as a padding token;
            None for the tokenizer's. Nothing is learned from it.
        name: see ``Map``.
    """

    tokenizer: TokenizerFile
    field: str = "messages"
    end_of_document: str | None = None
    name: str = "chat"
    writes: ClassVar[tuple[str, ...]] = ("tokens", "weights")
    depends_on: ClassVar[None] = None
    is_random: ClassVar[bool] = False
    is_fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, TokenizerFile):
            raise SettingError("Chat.tokenizer", self.tokenizer, "must be a TokenizerFile, which has a template")

    @property
    def reads(self) -> tuple[str, ...]:
        """The field that holds the messages."""
        return (self.field,)

    @functools.cached_property
    def template(self) -> "ChatTemplate":
        """The chat template."""
        from swift.data.chat import ChatTemplate

        return ChatTemplate.of(self.tokenizer)

    @functools.cached_property
    def separator(self) -> int:
        """The token that separates chats."""
        if self.end_of_document is None:
            return self.tokenizer.separator
        token = self.tokenizer.number_of(self.end_of_document)
        if token is None:
            allowed = f"{self.tokenizer.path} has no such token"
            raise SettingError("Chat.end_of_document", self.end_of_document, allowed)
        return token

    def function(self, sample: Sample) -> Sample:
        """Returns the tokens of a chat in the smallest unsigned type, and the weights of their losses, float32.

        Raises:
            DataError: the field holds no chat with an answer, the template cannot render it, or it contains the token
                that separates chats.
        """
        from swift.data.chat import answer_weights, messages_of

        chat = self.template.chat(messages_of(self.field, sample[self.field]), self.tokenizer.special)
        tokens, offsets_N2 = self.tokenizer.encode_rendered(chat.text)
        if self.end_of_document is not None and self.separator in tokens:
            raise DataError(f"a chat contains {self.end_of_document!r}, which separates chats by Chat.end_of_document")
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        return {"tokens": tokens.astype(dtype), "weights": answer_weights(offsets_N2, chat.answers)}


@dataclass(frozen=True)
class Shuffle:
    """An operator that shuffles the samples, differently in every epoch.

    Args:
        name: name of the operator in plans and profiles.
    """

    name: str = "shuffle"


@dataclass(frozen=True)
class Pack:
    """An operator that concatenates the ``tokens`` of all samples and cuts them into rows that overlap by one token.

    A row has the fields ``tokens`` and ``segments``, both int32[length + 1]. Segments number the documents, or parts of
    documents, within the row from 1; 0 is padding, which only the last row of an epoch has.

    Args:
        length: T, positions of a row; it holds T + 1 tokens, since the last position needs a label.
        name: see ``Map``.
    """

    length: int
    name: str = "pack"

    def __post_init__(self) -> None:
        check_count("Pack.length", self.length, least=1)


@dataclass(frozen=True)
class Stack:
    """An operator that stacks samples of equal shapes into batches; a batch may span two epochs.

    Args:
        size: number of samples in a batch.
        name: see ``Map``.
    """

    size: int
    name: str = "batch"

    def __post_init__(self) -> None:
        check_count("Stack.size", self.size, least=1)


Element = Map | Filter | DropDuplicates | Tokenize | Chat
"""An operator on single samples: returns one sample or none."""
Operator = Element | Shuffle | Pack | Stack
"""An operator of a pipeline."""


def name_of(operator: Operator) -> str:
    """Returns an operator's name: its own, else its function's, else that function's class."""
    function = getattr(operator, "function", operator)
    return operator.name or getattr(function, "__name__", "") or type(function).__name__


class OperatorError(DataError):
    """An operator raised on a sample, or returned something that is not a sample.

    Attributes:
        operator: name of the operator.
        reason: what went wrong, in one line.
    """

    def __init__(self, operator: str, reason: str):
        super().__init__(f"operator {operator}: {reason}")
        self.operator, self.reason = operator, reason


def applied(element: Element, number: int) -> Apply:
    """Returns a function that applies an operator to a sample; that function returns None to drop the sample.

    Args:
        element: operator; it is given only the fields that it reads.
        number: number of the operator in the pipeline, which seeds its random numbers.
    """
    name, reads = name_of(element), element.reads

    def read_fields(sample: Sample) -> dict[str, Any]:
        if reads is None:
            return dict(sample)
        missing = [field for field in reads if field not in sample]
        if missing:
            raise OperatorError(name, f"there is no field {missing[0]!r}, there are {', '.join(sample)}")
        return {field: sample[field] for field in reads}

    if isinstance(element, DropDuplicates):  # only checks the field: the survey sees all samples, and drops duplicates
        return lambda sample, _: sample if read_fields(sample) else None
    if isinstance(element, Filter):
        test = element.function
        return lambda sample, _: sample if _called(name, test, read_fields(sample)) else None

    def changed(sample: Sample, draw: Draw) -> Sample:
        inputs = read_fields(sample)
        is_random = isinstance(element, Map) and element.is_random
        outputs = _called(name, element.function, inputs, *([draw(number)] if is_random else []))
        if not hasattr(outputs, "keys"):
            raise OperatorError(name, f"returns {type(outputs).__name__}, and must return a mapping of fields")
        if element.writes is None:
            return outputs
        if set(outputs) != set(element.writes):
            declared, returned = ", ".join(element.writes) or "none", ", ".join(outputs) or "none"
            raise OperatorError(name, f"returns the fields {returned}, and its `writes` names {declared}")
        return {**sample, **outputs}

    return changed


def _called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (OperatorError, DocumentError):
        raise
    except DataError as error:  # its message already says what is wrong
        raise OperatorError(name, str(error)) from error
    except KeyError as error:  # its message is only the key, which may be a field or anything else
        raise OperatorError(name, f"raises KeyError: {error}") from error
    except Exception as error:  # raised by the user's code
        raise OperatorError(name, f"raises {error_line(error)}") from error


def chained(functions: Sequence[Apply]) -> Apply:
    """Composes functions in order; stops with None as soon as one of them drops the sample."""

    def chain(sample: Sample, draw: Draw) -> Sample | None:
        changed_sample: Sample | None = sample
        for function in functions:
            if changed_sample is None:
                return None
            changed_sample = function(changed_sample, draw)
        return changed_sample

    return chain


def draws(seed: int, epoch: int, number: int) -> Draw:
    """Returns a sample's generators, seeded only by the seed, the epoch, the sample's number and the operator."""
    return lambda operator: np.random.default_rng((seed, operator, epoch, number))
