"""The rules by which operators of a level may pass each other without changing a sample."""

from collections.abc import Iterator, Sequence

from swift.data.pipeline.operators import DropDuplicates, Element, Filter, name_of


def must_precede(first: Element, second: Element) -> bool:
    """Whether an operator has to stay before another that the pipeline has somewhere after it.

    Operators commute where neither writes what the other reads or writes; random ones, too, since their numbers depend
    on the sample and not on its place. A record that an operator raises on out of its place is made again in the order
    of the pipeline, so that only such a record's own error counts.
    """
    if first.is_fixed or second.is_fixed:
        return True
    chooses = isinstance(first, Filter | DropDuplicates)
    if chooses and not isinstance(second, Filter | DropDuplicates):
        return True  # nothing is gained by making what is then left out
    if chooses and (isinstance(first, DropDuplicates) or isinstance(second, DropDuplicates)):
        return not _keeps_equals_together(first, second)
    if second.depends_on is not None:
        return name_of(first) in second.depends_on
    return _meet(first.writes, second.reads) or _meet(first.writes, second.writes) or _meet(first.reads, second.writes)


def _keeps_equals_together(first: Element, second: Element) -> bool:
    """Whether a filter sees only the field whose duplicates are dropped: equal samples then stay or go together."""
    if isinstance(first, DropDuplicates) and isinstance(second, DropDuplicates):
        return False
    test, dropped = (second, first) if isinstance(first, DropDuplicates) else (first, second)
    assert isinstance(dropped, DropDuplicates)
    return test.reads is not None and set(test.reads) <= {dropped.field}


def _meet(fields: Sequence[str] | None, others: Sequence[str] | None) -> bool:
    """Whether two sets of fields have one in common; None has all."""
    if fields is None or others is None:
        return fields != () and others != ()
    return bool(set(fields) & set(others))


def legal_orders(elements: Sequence[Element], most: int) -> Iterator[tuple[Element, ...]]:
    """Yields orders of operators that give the same samples, the written one first; at most ``most`` of them."""
    num = len(elements)
    before = [{i for i in range(j) if must_precede(elements[i], elements[j])} for j in range(num)]
    left = most

    def extend(placed: tuple[int, ...]) -> Iterator[tuple[Element, ...]]:
        nonlocal left
        if left <= 0:
            return
        if len(placed) == num:
            left -= 1
            yield tuple(elements[place] for place in placed)
            return
        done = set(placed)
        for place in range(num):
            if place not in done and before[place] <= done:
                yield from extend((*placed, place))

    yield from extend(())
