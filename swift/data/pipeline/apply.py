"""Operators applied to one sample."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swift.data.files import DataError, DocumentError
from swift.data.pipeline.operators import DropDuplicates, Element, Filter, Map, Sample, name_of
from swift.errors import error_line

Draw = Callable[[int], np.random.Generator]
"""The random numbers of one sample, by the number of the operator."""
Apply = Callable[[Sample, Draw], Sample | None]


class OperatorError(DataError):
    """An operator that raises on a sample, or returns none.

    Attributes:
        operator: its name.
        why: what was wrong, in one line.
    """

    def __init__(self, operator: str, why: str):
        super().__init__(f"operator {operator}: {why}")
        self.operator, self.why = operator, why


def applied(element: Element, number: int) -> Apply:
    """Makes the function that applies an operator to a sample: None if the sample is left out.

    Args:
        element: operator; it is given no other fields than it reads.
        number: number of the operator, which keys its random numbers.
    """
    name, reads = name_of(element), element.reads

    def given(sample: Sample) -> dict[str, Any]:
        if reads is None:
            return dict(sample)
        missing = [field for field in reads if field not in sample]
        if missing:
            raise OperatorError(name, f"there is no field {missing[0]!r}, there are {', '.join(sample)}")
        return {field: sample[field] for field in reads}

    if isinstance(element, DropDuplicates):  # which leaves out nothing by itself, and needs its field
        return lambda sample, _: sample if given(sample) else None
    if isinstance(element, Filter):
        test = element.function
        return lambda sample, _: sample if _called(name, test, given(sample)) else None

    def changed(sample: Sample, draw: Draw) -> Sample:
        inputs = given(sample)
        is_random = isinstance(element, Map) and element.is_random
        made = _called(name, element.function, inputs, *([draw(number)] if is_random else []))
        if not hasattr(made, "keys"):
            raise OperatorError(name, f"returns {type(made).__name__}, and must return a mapping of fields")
        if element.writes is None:
            return made
        if set(made) != set(element.writes):
            said, true = ", ".join(element.writes) or "none", ", ".join(made) or "none"
            raise OperatorError(name, f"returns the fields {true}, and its `writes` names {said}")
        return {**sample, **made}

    return changed


def _called(name: str, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
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
        made: Sample | None = sample
        for function in functions:
            if made is None:
                return None
            made = function(made, draw)
        return made

    return chain


def draws(seed: int, epoch: int, number: int) -> Draw:
    """Makes the random numbers of a sample: a function of the seed, the epoch, its number and the operator alone."""
    return lambda operator: np.random.default_rng((seed, operator, epoch, number))
