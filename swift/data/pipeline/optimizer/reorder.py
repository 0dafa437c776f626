"""Reordering: of all legal orders of the operators of records, the one that is predicted to take least time.

Samples that are smaller or fewer come first, as far as the operators allow it. Every order is judged with the cache
that suits it best, since what may be kept ends at the first random operator.
"""

from collections.abc import Iterator
from dataclasses import replace

from swift.data.pipeline.operators import Element, name_of
from swift.data.pipeline.optimizer.cost import Resources, cheapest_cache, predict
from swift.data.pipeline.optimizer.legal import legal_orders, must_precede
from swift.data.pipeline.optimizer.profile import InputProfile
from swift.data.pipeline.plan import InputPlan

MOST_ORDERS = 2000
"""Orders that are all tried; where there are more, the best is improved step by step."""


def reorder(plan: InputPlan, profile: InputProfile, resources: Resources) -> InputPlan:
    """Returns the plan with the order of records' operators that costs least; the present one where none costs less."""

    def seconds_of(one: InputPlan) -> float:
        return cheapest_cache(one, profile, resources)[1]

    elements = plan.pipeline.levels[0].elements
    orders = list(legal_orders(elements, MOST_ORDERS + 1))
    candidates = [_with_order(plan, order) for order in orders[:MOST_ORDERS]]
    best = min([plan, *candidates], key=seconds_of)
    if len(orders) > MOST_ORDERS:
        best = _improved(best, elements, seconds_of)
    usual, found = seconds_of(plan), seconds_of(best)
    if found >= usual * (1 - 1e-9):
        reason = f"order: as written, the cheapest of {len(orders)} that give the same samples"
        return replace(plan, reasons=(*plan.reasons, reason))
    moved = ", ".join(best.orders[0])
    epoch_s = predict(plan, profile).epoch_s
    reason = f"order: {moved}: {found:.3g} s instead of {usual:.3g} s of one core as written ({epoch_s:.3g} s an epoch)"
    return replace(best, reasons=(*plan.reasons, reason))


def _with_order(plan: InputPlan, order: tuple[Element, ...]) -> InputPlan:
    return replace(plan, orders=(tuple(map(name_of, order)), *plan.orders[1:]))


def _improved(plan: InputPlan, elements: tuple[Element, ...], seconds_of: object) -> InputPlan:
    """Swaps neighbours while that makes a plan cheaper."""
    assert callable(seconds_of)
    best, seconds = plan, seconds_of(plan)
    is_better = True
    while is_better:
        is_better = False
        for swapped in _swaps(best, elements):
            if seconds_of(swapped) < seconds * (1 - 1e-9):
                best, seconds, is_better = swapped, seconds_of(swapped), True
                break
    return best


def _swaps(plan: InputPlan, elements: tuple[Element, ...]) -> Iterator[InputPlan]:
    """Yields the plans in which two neighbours of the order are swapped that may be."""
    order = plan.elements(0)
    for place in range(len(order) - 1):
        pair = sorted(order[place : place + 2], key=elements.index)
        if not must_precede(pair[0], pair[1]):
            yield _with_order(plan, (*order[:place], order[place + 1], order[place], *order[place + 2 :]))
