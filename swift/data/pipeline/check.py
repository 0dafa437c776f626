"""Samples compared with those of the plain order, and the operator that is to blame where they differ.

An operator can be untrue in two ways: ``depends_on`` leaves out what it needs, or it is not a function of its sample,
as where it counts its calls, or writes into an array that it was given.
"""

from collections.abc import Sequence
from typing import Any

from swift.data.files import DataError
from swift.data.pipeline.apply import Draw, OperatorError
from swift.data.pipeline.encoding import Unencodable, field_bytes
from swift.data.pipeline.operators import Element, name_of
from swift.data.pipeline.plan import InputPlan


class UntrueOperator(DataError):
    """An operator whose samples depend on more than it says."""


def outcome(plan: InputPlan, elements: Sequence[Element], number: int, draw: Draw) -> Any:
    """Makes a record's sample by operators in an order; None if it is left out, or an operator raises."""
    sample: Any = plan.pipeline.source[number]
    try:
        for element in elements:
            sample = None if sample is None else plan.pipeline.applied(element)(sample, draw)
    except OperatorError as error:
        return error
    return sample


def is_same(sample: Any, other: Any) -> bool:
    """Whether two samples are equal bit for bit; an error is not a sample, and equal to any.

    Out of its place an operator may raise on what it would not have seen: such a record is made in the written order.
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


def check_record(plan: InputPlan, number: int, draw: Draw, made: Any) -> None:
    """Compares the sample of a record with that of the plain order.

    Args:
        plan: plan that made the sample.
        number: number of the record.
        draw: random numbers of the sample.
        made: the sample; None if the plan leaves the record out.

    Raises:
        UntrueOperator: they differ; the message names the operator.
    """
    written, planned = plan.pipeline.levels[0].elements, plan.elements(0)
    if is_same(outcome(plan, written, number, draw), made):
        return
    place = plan.pipeline.source.place(number)
    raise UntrueOperator(f"{place}: {_blamed(plan, written, planned, number, draw)}")


def _blamed(plan: InputPlan, written: Sequence[Element], planned: Sequence[Element], number: int, draw: Draw) -> str:
    for end in range(1, len(written) + 1):
        first, second = (outcome(plan, written[:end], number, draw) for _ in range(2))
        if not is_same(first, second):
            return f"operator {name_of(written[end - 1])} gives another sample when it is called again"
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
                why = "which its `depends_on` does not name: the sample differs where they change places"
                return f"operator {name_of(moved)} depends on {name_of(passed)}, {why}"
            before = after
    return "the sample that was kept or made elsewhere, or its file, is not the one that the operators give now"
