"""A survey of a source: which records stay, how many tokens they have, and, if the plan says so, what is kept of them.

All that a filter, a packed row or a skipped record needs to know before sample i can be found by its number. Every
record is examined once, by as many threads and processes as the plan has.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from swift.data.files import DataError
from swift.data.pipeline.apply import OperatorError, applied, draws
from swift.data.pipeline.check import check_record, outcome
from swift.data.pipeline.encoding import Unencodable, encoded, field_bytes
from swift.data.pipeline.operators import DropDuplicates, Element, name_of
from swift.data.pipeline.plan import InputPlan
from swift.data.pipeline.run import in_order


class KeptSamples(Protocol):
    """Samples that are kept, by their place among the records that stay."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Returns a sample, whose arrays are the caller's own."""
        ...


class Store(Protocol):
    """A place to keep samples while a source is surveyed."""

    def add(self, number: int, content: bytes) -> None:
        """Adds the next sample that stays, see ``encoded``; ``number`` is that of its record."""
        ...

    def closed(self) -> KeptSamples:
        """Returns all of them."""
        ...


@dataclass(frozen=True, eq=False)
class Survey:
    """Findings of a survey.

    Attributes:
        num_kept: number of records that stay.
        numbers: numbers of the records that stay, int64[num_kept]; None: all of them.
        lengths: tokens of each, int64[num_kept]; None: nothing is packed.
        cache: samples that are kept; None: none.
        skipped: for each record that an operator raised on, its place and why.
    """

    num_kept: int
    numbers: np.ndarray | None = None
    lengths: np.ndarray | None = None
    cache: KeptSamples | None = field(default=None, repr=False)
    skipped: tuple[str, ...] = ()

    def number(self, place: int) -> int:
        """Returns the number of a record that stays, by its place among them."""
        return place if self.numbers is None else int(self.numbers[place])


@dataclass(frozen=True)
class _Examined:
    """Findings about one record.

    Attributes:
        stays: whether it passes all operators, if it is not a duplicate.
        error: why an operator raised, and which; None: none did.
        digests: for each ``DropDuplicates`` that it has reached, its name and the digest of the field.
        length: number of its tokens.
        content: what is kept of it; None: nothing.
    """

    stays: bool
    error: str | None
    digests: tuple[tuple[str, bytes], ...]
    length: int = 0
    content: bytes | None = None


class _Examiner:
    """Examined records by number; another process gets it as a pickle."""

    def __init__(self, plan: InputPlan, num_cached: int | None):
        self._plan, self._num_cached = plan, num_cached

    def __len__(self) -> int:
        return len(self._plan.pipeline.source)

    def __getitem__(self, number: int) -> _Examined:
        plan = self._plan
        planned = plan.elements(0)[: plan.num_surveyed]
        found = self._examine(planned, number, self._num_cached)
        if plan.check_every and number % plan.check_every == 0:
            draw = draws(0, 0, number)
            check_record(plan, number, draw, outcome(plan, plan.elements(0), number, draw))
        if found.error is not None:  # out of its place an operator may see what it would not have seen
            written = [one for one in plan.pipeline.levels[0].elements if one in planned]
            found = self._examine(written, number, None)
        return found

    def _examine(self, elements: Sequence[Element], number: int, num_cached: int | None) -> _Examined:
        plan, digests, content = self._plan, list[tuple[str, bytes]](), None
        operators = {name_of(one): place for place, one in enumerate(plan.pipeline.operators)}
        sample: Any = plan.pipeline.source[number]
        for place, element in enumerate(elements):
            if place == num_cached:
                content = encoded(sample)
            name = name_of(element)
            try:
                following = applied(element, operators[name])(sample, draws(0, 0, number))
                if isinstance(element, DropDuplicates):
                    digests.append((name, _digest_of(name, sample, element.field)))
            except OperatorError as error:
                return _Examined(False, str(error), tuple(digests))
            if following is None:
                return _Examined(False, None, tuple(digests))
            sample = following
        if num_cached == len(elements):
            content = encoded(sample)
        length = 0
        if plan.num_packed:
            if "tokens" not in sample:
                why = f"there is no field 'tokens', there are {', '.join(sample)}: tokenize before"
                raise DataError(f"{plan.pipeline.source.place(number)}: operator pack: {why}")
            length = len(sample["tokens"])
        return _Examined(True, None, tuple(digests), length, content)


def survey(plan: InputPlan, store: Store | None = None, report: Callable[[int, int], None] | None = None) -> Survey:
    """Examines all records of a source; none if nothing needs to be known of them.

    Args:
        plan: plan of a pipeline.
        store: where the samples at the plan's cache are kept; None: the plan's cache is left out.
        report: called with the number of records examined, and that of all.

    Raises:
        DataError: an operator raises on more records than ``Pipeline.most_skipped``, a field cannot be kept, or the
            source cannot be read.
    """
    source, num_needed = plan.pipeline.source, plan.num_surveyed
    num_cached = None if store is None or plan.cache is None else plan.cache.num_elements
    if not len(source) or (not num_needed and not plan.num_packed and num_cached is None):
        return Survey(len(source))
    kept, lengths, skipped, seen = list[int](), list[int](), list[str](), dict[str, set[bytes]]()
    for number, found in enumerate(_examined(plan, num_cached)):
        if report is not None:
            report(number + 1, len(source))
        if _is_duplicate(found, seen):
            continue
        if found.error is not None:
            skipped.append(f"{source.place(number)}: {found.error}")
            if len(skipped) > plan.pipeline.most_skipped:
                raise DataError(_too_many(skipped))
        elif found.stays:
            kept.append(number)
            lengths.append(found.length)
            if store is not None and found.content is not None:
                store.add(number, found.content)
    numbers = None if len(kept) == len(source) else np.array(kept, np.int64)
    counted = np.array(lengths, np.int64) if plan.num_packed else None
    cache = None if store is None or num_cached is None else store.closed()
    return Survey(len(kept), numbers, counted, cache, tuple(skipped))


def _examined(plan: InputPlan, num_cached: int | None) -> Iterator[_Examined]:
    try:
        yield from in_order(_Examiner(plan, num_cached), plan)
    except Unencodable as error:
        raise DataError(f"samples cannot be kept: {error}") from error


def _is_duplicate(found: _Examined, seen: dict[str, set[bytes]]) -> bool:
    """Whether a record is dropped as a duplicate; notes its digests up to there."""
    for name, digest in found.digests:
        if digest in seen.setdefault(name, set()):
            return True
        seen[name].add(digest)
    return False


def _too_many(skipped: list[str]) -> str:
    if len(skipped) == 1:
        return skipped[0]
    return f"{skipped[-1]}; Pipeline.most_skipped = {len(skipped) - 1} records were skipped before"


def _digest_of(name: str, sample: Any, of: str) -> bytes:
    """Returns the digest of a field."""
    try:
        return hashlib.blake2b(field_bytes(sample[of]), digest_size=16).digest()
    except KeyError as error:
        raise OperatorError(name, f"there is no field {error}") from error
    except Unencodable as error:
        raise OperatorError(name, f"field {of!r} cannot be compared: {error}") from error
