"""Records on their way through the first operators: wherever these run, the rest of the way is the same."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.pipeline.apply import Draw, OperatorError
from swift.data.pipeline.encoding import Unencodable, field_bytes
from swift.data.pipeline.operators import DropDuplicates, Element, Filter, Sample, name_of
from swift.data.pipeline.plan import InputPlan


@dataclass(frozen=True)
class Begun:
    """A record after the first operators.

    Attributes:
        num_done: operators that it has passed.
        sample: what they have made of it; None: it is left out, or one of them raised.
        digests: for each ``DropDuplicates`` that it has reached, its name and the digest of the field.
        error: why an operator raised, and which; None: none did.
    """

    num_done: int
    sample: Sample | None
    digests: tuple[tuple[str, bytes], ...] = ()
    error: str | None = None


def advanced(plan: InputPlan, begun: Begun, elements: Sequence[Element], draw: Draw, *, chooses: bool = True) -> Begun:
    """Applies the next operators to a record.

    Args:
        plan: plan of the pipeline that has these operators.
        begun: the record so far.
        elements: operators, in their order.
        draw: random numbers of the record.
        chooses: whether filters leave it out, and digests are made; in an epoch it is known that it stays.
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
            return Begun(num_done, None, tuple(digests), str(error))
        if following is None:
            return Begun(num_done, None, tuple(digests))
        sample = following
    return Begun(num_done, sample, tuple(digests))


def _digest_of(name: str, sample: Any, of: str) -> bytes:
    """Returns the digest of a field."""
    try:
        return hashlib.blake2b(field_bytes(sample[of]), digest_size=16).digest()
    except Unencodable as error:
        raise OperatorError(name, f"field {of!r} cannot be compared: {error}") from error
