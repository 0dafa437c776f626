"""Applies operators to a record in stages, and checks samples against the order as written.

The first operators may run in another process or on another host; ``apply_operators`` continues from wherever they
stopped. If a sample differs from the one produced in the order as written, the operator at fault is identified. There
are two causes: ``depends_on`` lacks an operator, or an operator is not a function of its sample. For example, it counts
its calls, or writes into an array that it was given.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.encoding import Unencodable, field_bytes
from swift.data.operators import Draw, DropDuplicates, Element, Filter, OperatorError, Sample, name_of
from swift.data.pipeline import InputPlan
from swift.data.sources import DataError


@dataclass(frozen=True)
class PartialSample:
    """A record to which the first operators of a plan have been applied.

    Attributes:
        num_done: number of operators that have run.
        sample: the sample so far, or None if it was dropped or an operator raised.
        digests: for each ``DropDuplicates`` that the record has reached, the operator's name and the field's digest.
        error: which operator raised and why, or None if none did.
    """

    num_done: int
    sample: Sample | None
    digests: tuple[tuple[str, bytes], ...] = ()
    error: str | None = None


def apply_operators(
    plan: InputPlan, begun: PartialSample, elements: Sequence[Element], draw: Draw, *, chooses: bool = True
) -> PartialSample:
    """Applies the next operators to a record.

    Args:
        plan: plan of the operators' pipeline.
        begun: the record so far.
        elements: operators to run, in order.
        draw: random generators of the record.
        chooses: whether to run filters and compute digests, as a survey does. An epoch does not, since it reads only
            records that the survey has kept.
    """
    sample, digests = begun.sample, list(begun.digests)
    num_done = begun.num_done + len(elements)
    if sample is None or not elements:
        return begun
    for element in elements:
        if not chooses and isinstance(element, Filter | DropDuplicates):
            continue
        name = name_of(element)
        try:
            following = plan.pipeline.applied(element)(sample, draw)
            if isinstance(element, DropDuplicates):
                digests.append((name, _digest_of(name, sample, element.field)))
        except OperatorError as error:
            return PartialSample(num_done, None, tuple(digests), str(error))
        if following is None:
            return PartialSample(num_done, None, tuple(digests))
        sample = following
    return PartialSample(num_done, sample, tuple(digests))


def _digest_of(name: str, sample: Any, field: str) -> bytes:
    try:
        return hashlib.blake2b(field_bytes(sample[field]), digest_size=16).digest()
    except Unencodable as error:
        raise OperatorError(name, f"field {field!r} cannot be compared: {error}") from error


class MisdeclaredOperator(DataError):
    """An operator depends on more than it declares."""


def outcome(plan: InputPlan, elements: Sequence[Element], number: int, draw: Draw) -> Any:
    """Runs operators on a record in the given order; returns the sample, None if it is dropped, or OperatorError."""
    sample: Any = plan.pipeline.source[number]
    try:
        for element in elements:
            sample = None if sample is None else plan.pipeline.applied(element)(sample, draw)
    except OperatorError as error:
        return error
    return sample


def is_same(sample: Any, other: Any) -> bool:
    """Whether two samples are equal bit for bit; an error counts as equal to anything.

    A moved operator may raise on a sample that an earlier operator would have dropped or changed. Such a record is
    processed again in the order as written, so the error does not indicate a fault.
    """
    if isinstance(sample, OperatorError) or isinstance(other, OperatorError):
        return True
    if sample is None or other is None:
        return sample is other
    if set(sample) != set(other):
        return False
    return all(_equal(sample[name], other[name]) for name in sample)


def _equal(value: Any, other: Any) -> bool:
    try:
        return field_bytes(value) == field_bytes(other)
    except Unencodable:
        return bool(value == other) if type(value) is type(other) else False


def check_record(plan: InputPlan, number: int, draw: Draw, sample: Any) -> None:
    """Checks that a record's sample equals the one produced in the order as written.

    Args:
        plan: plan that produced the sample.
        number: number of the record.
        draw: random generators of the sample.
        sample: the sample, or None if the plan drops the record.

    Raises:
        MisdeclaredOperator: the samples differ; the message names the operator at fault.
    """
    written, planned = plan.pipeline.levels[0].elements, plan.elements(0)
    if is_same(outcome(plan, written, number, draw), sample):
        return
    place = plan.pipeline.source.place(number)
    raise MisdeclaredOperator(f"{place}: {_blamed(plan, written, planned, number, draw)}")


def _blamed(plan: InputPlan, written: Sequence[Element], planned: Sequence[Element], number: int, draw: Draw) -> str:
    for end in range(1, len(written) + 1):
        first, second = (outcome(plan, written[:end], number, draw) for _ in range(2))
        if not is_same(first, second):
            return f"operator {name_of(written[end - 1])} gives another sample when it is called again"
    # Turn the written order into the planned one by swaps of adjacent operators: the first swap that changes the sample
    # identifies the two operators that do not commute.
    order, before = list(written), outcome(plan, written, number, draw)
    for target, element in enumerate(planned):
        for place in range(order.index(element), target, -1):
            order[place - 1], order[place] = order[place], order[place - 1]
            after = outcome(plan, order, number, draw)
            if not is_same(before, after):
                moved, passed = order[place - 1], order[place]
                names = f"{name_of(moved)} and {name_of(passed)}"
                if moved.depends_on is None:
                    return f"operators {names} change more than their fields: one writes into an array that it is given"
                reason = "which its `depends_on` does not name: the sample differs where they change places"
                return f"operator {name_of(moved)} depends on {name_of(passed)}, {reason}"
            before = after
    return "the sample that was kept or made elsewhere, or its file, is not the one that the operators give now"
