"""Recovery of the slices of lost expert ranks from the best copies that are left.

In this order: the snapshot of the current iteration, in the memory of another rank (exact); for weights a replica in a
slot of a live rank (of this iteration, rounded where the compute dtype is narrower); the newest snapshot; storage. A
rank that is lost in one stage still has its slices of the others.

Legend: P stages, N ranks, S slots of a rank, W values of a slot.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.checkpoint.memory.message_texts import RankSource, kept_lines, rank_facts, rank_lines
from swift.checkpoint.memory.slice_search import LostSlices, RankCopy, SliceSearch, lost_slices, slice_names, slice_of
from swift.checkpoint.partial.expert_units import StateSplit, by_name
from swift.checkpoint.storage.manifest import Ledger
from swift.checkpoint.storage.reader import RestorePlan


class Recovered(NamedTuple):
    """A state with all slices recovered.

    Attributes:
        state: state of the old shape, on the host.
        ledger: ledger with the token updates that are lost.
        lines: the source of every slice, for the terminal.
        facts: the same for ``events.jsonl``.
    """

    state: Any
    ledger: Ledger
    lines: list[str]
    facts: dict[str, Any]


def recover_ranks(
    state: Any,
    slots: Mapping[str, np.ndarray] | None,
    split: StateSplit,
    lost: Collection[tuple[int, int]],
    *,
    copies: Sequence[RankCopy],
    step: int,
    ledger: Ledger,
    stored: Callable[[], tuple[Any, RestorePlan] | None],
    names: Sequence[int] | None = None,
) -> Recovered:
    """Fills in the slices of lost ranks.

    Args:
        state: state on the host, without slots, of all ranks before the loss; the slices of lost ranks are not read.
        slots: slots of the same ranks by group, ``[P, layer, N, S, W]``, as the state's placement has them; None: none.
        split: division of the state.
        lost: pairs (stage, rank) whose memory is gone.
        copies: snapshots; those that lost ranks held, or that are newer than the state, are ignored.
        step: iterations done.
        ledger: ledger as of this iteration.
        stored: function that reads the newest sound checkpoint, in the shape of the state, with its plan; called at
            most once, where memory does not have everything. Returns None where there is none.
        names: names of the ranks, where they differ from their numbers, as in a run that has lost some before.

    Raises:
        RunError: a slice is neither in memory nor in storage.
    """
    arrays = {name: np.array(leaf) for name, leaf in by_name(state).items()}
    newest_first = sorted((copy for copy in copies if copy.step <= step), key=lambda copy: -copy.step)
    names = range(split.num_ranks) if names is None else names
    gone, stored = frozenset(lost), cache(stored)
    search = SliceSearch(
        split=split,
        placement_PLNS=arrays["placement"],
        slots=slots or {},
        lost=gone,
        copies=newest_first,
        step=step,
        stored=stored,
        names=names,
        ledger=ledger,
    )
    sources, lost_LE = list[RankSource](), np.zeros_like(ledger.tally.contained_LE)
    for wanted in lost_slices(split, lost):
        source, num_lost = _fill(search, arrays, wanted)
        sources.append(source)
        if wanted.unit is not None:
            lost_LE[wanted.unit] += num_lost
    lost_LE = -(-lost_LE // split.num_ranks)  # rounded up; only one slice of each expert, one Nth, fell back
    tally = ledger.tally.fell_back(lost_LE)
    passed_over = [f"passed over: {why}" for why in _passed_over(stored)]
    facts = {"sources": rank_facts(sources), "updates_lost": lost_LE.sum(axis=1).tolist()}
    return Recovered(
        jax.tree.unflatten(jax.tree.structure(split.abstract), [arrays[name] for name in split.shapes]),
        replace(ledger, tally=tally),
        [*rank_lines(sources, split, step), *kept_lines(gone, split.num_stages, names), *passed_over],
        facts | {"plt": tally.plt, "faults": tally.num_faults},
    )


def _fill(search: SliceSearch, arrays: Mapping[str, np.ndarray], wanted: LostSlices) -> tuple[RankSource, int]:
    """Fills in lost slices from their best copies; returns their origins, and the token updates that they lack."""
    weights, moments = search.find(wanted)
    weight_names, moment_names = slice_names(search.split, wanted.unit)
    for found, names in ((weights, weight_names), (moments, moment_names)):
        for name in names:
            slice_of(search.split, arrays[name], wanted)[...] = found.read(name)
    num_lost = 0
    if wanted.unit is not None and weights.contained is not None:
        num_lost = max(0, int(search.ledger.tally.contained_LE[wanted.unit]) - weights.contained)
    source = RankSource(*wanted, weights.origin, moments.origin if moment_names else None)
    return source.named(search.names), num_lost


def _passed_over(stored: Any) -> tuple[str, ...]:
    """Damage found in storage, if it was read."""
    found = stored() if stored.cache_info().currsize else None
    return () if found is None else found[1].passed_over
