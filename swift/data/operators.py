"""Operators of a pipeline: what each of them says of itself, and how it is applied to a sample.

A sample is a mapping of fields. An operator that names the fields it reads gets only these, and one that names the
fields it writes returns exactly these: what it says of its fields cannot be untrue. What it says with ``depends_on``
can be, see ``swift.data.sample_checks``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from swift.data.sources import DataError, DocumentError
from swift.data.tokenizer import Tokenizer
from swift.errors import SettingError, check_count, error_line

Sample = Mapping[str, Any]
"""Fields of a sample, by name: text, bytes, numbers, arrays."""

Draw = Callable[[int], np.random.Generator]
"""The random numbers of one sample, by the number of the operator."""
Apply = Callable[[Sample, Draw], Sample | None]


def _check_fields(setting: str, fields: tuple[str, ...] | None) -> None:
    is_named = isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)
    if fields is not None and not is_named:
        raise SettingError(setting, fields, "must be a tuple of names, such as ('text',), or None")


@dataclass(frozen=True)
class Map:
    """A function of each sample.

    Args:
        function: function of a sample that returns fields; a random one takes a ``numpy.random.Generator`` as well.
        reads: fields that it is given; None: all.
        writes: fields that it returns, which are set in the sample; None: what it returns is the whole new sample.
        depends_on: names of the operators before it that have to stay before it, although they write what it reads or
            writes; None: those that the fields tell.
        is_random: the generator that it takes depends on the seed, the epoch and the number of the sample alone.
        is_fixed: no operator may pass it.
        name: name for ``depends_on``, messages and profiles; that of the function unless given.
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
    """Samples for which a function returns true; the others are left out.

    Args:
        function: function of a sample that returns whether it stays.
        reads: fields that it is given; None: all.
        depends_on: see ``Map``.
        is_fixed: no operator may pass it.
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
    """Samples whose field differs from that of every sample before them in the order of the source.

    Args:
        field: field that is compared, by a digest of 16 bytes.
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
    """Tokens of a text, with the separator that ends a document.

    Args:
        tokenizer: tokenizer of the text.
        field: field of the text, which becomes the field ``tokens``.
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
        """The text."""
        return (self.field,)

    def function(self, sample: Sample) -> Sample:
        """Returns the tokens of a text that is not empty, in the smallest unsigned type, and a separator."""
        tokens = self.tokenizer.encode(sample[self.field])
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        ends = [self.tokenizer.separator] if len(tokens) else []
        return {"tokens": np.concatenate([tokens, ends]).astype(dtype)}


@dataclass(frozen=True)
class Shuffle:
    """Samples in a random order, another one in every epoch.

    Args:
        name: name of the operator in plans and profiles.
    """

    name: str = "shuffle"


@dataclass(frozen=True)
class Pack:
    """Rows of tokens: the field ``tokens`` of all samples end to end, cut into rows that overlap by one token.

    A row has the fields ``tokens`` and ``segments``, both int32[length + 1]; a segment is a document, or the part of it
    that is in the row, counted from 1, and 0 is padding, which only the last row of an epoch has.

    Args:
        length: T, positions of a row; with the label of the last one it has T + 1 tokens.
        name: see ``Map``.
    """

    length: int
    name: str = "pack"

    def __post_init__(self) -> None:
        check_count("Pack.length", self.length, least=1)


@dataclass(frozen=True)
class Stack:
    """Batches of samples with equal shapes, stacked; one may hold the end of an epoch and the start of the next.

    Args:
        size: number of samples in a batch.
        name: see ``Map``.
    """

    size: int
    name: str = "batch"

    def __post_init__(self) -> None:
        check_count("Stack.size", self.size, least=1)


Element = Map | Filter | DropDuplicates | Tokenize
"""An operator of single samples: of what it is given, it returns one or none."""
Operator = Element | Shuffle | Pack | Stack
"""An operator of a pipeline."""


def name_of(operator: Operator) -> str:
    """Returns the name of an operator, for messages and profiles."""
    function = getattr(operator, "function", operator)
    return operator.name or getattr(function, "__name__", "") or type(function).__name__


class OperatorError(DataError):
    """An operator that raises on a sample, or returns none.

    Attributes:
        operator: its name.
        reason: what was wrong, in one line.
    """

    def __init__(self, operator: str, reason: str):
        super().__init__(f"operator {operator}: {reason}")
        self.operator, self.reason = operator, reason


def applied(element: Element, number: int) -> Apply:
    """Makes the function that applies an operator to a sample: None if the sample is left out.

    Args:
        element: operator; it is given no other fields than it reads.
        number: number of the operator, which keys its random numbers.
    """
    name, reads = name_of(element), element.reads

    def read_fields(sample: Sample) -> dict[str, Any]:
        if reads is None:
            return dict(sample)
        missing = [field for field in reads if field not in sample]
        if missing:
            raise OperatorError(name, f"there is no field {missing[0]!r}, there are {', '.join(sample)}")
        return {field: sample[field] for field in reads}

    if isinstance(element, DropDuplicates):  # which leaves out nothing by itself, and needs its field
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
    except DataError as error:  # which says what is wrong
        raise OperatorError(name, str(error)) from error
    except KeyError as error:  # of a field, or of anything else
        raise OperatorError(name, f"raises KeyError: {error}") from error
    except Exception as error:  # raised by the user's code
        raise OperatorError(name, f"raises {error_line(error)}") from error


def chained(functions: Sequence[Apply]) -> Apply:
    """Makes one function of several, each of which gets what the one before it returns."""

    def chain(sample: Sample, draw: Draw) -> Sample | None:
        changed_sample: Sample | None = sample
        for function in functions:
            if changed_sample is None:
                return None
            changed_sample = function(changed_sample, draw)
        return changed_sample

    return chain


def draws(seed: int, epoch: int, number: int) -> Draw:
    """Makes the random numbers of a sample: a function of the seed, the epoch, its number and the operator alone."""
    return lambda operator: np.random.default_rng((seed, operator, epoch, number))
