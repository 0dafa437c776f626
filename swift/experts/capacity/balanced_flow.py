"""Balanced flow: divides each expert's tokens over its slots so that the fullest rank gets as few tokens as possible.

This linear program is solved as an integer flow, up to a negligible tolerance. A *level* is a lower bound of the
largest load, initially the mean load of the ranks. Ranks above it pass tokens along shortest paths to ranks with room
below it: from a slot to its expert, and from there to another rank's slot that holds the expert (Dinic's algorithm;
paths that carry large amounts come first). If some rank has no path, the tokens of all ranks that it can reach have to
stay on these ranks. Their mean load is then a larger lower bound: the next level.

Even when the load of the fullest rank is minimal, several ranks may have more tokens than rows. ``shift_overflow``
moves this excess in the same way until no path is left: then no split would serve more tokens.

The computation consists of sums over the slots of a rank and over the slots of an expert. All ranks compute the same
result, because integer arithmetic is exact no matter how a compiler fuses it.

Legend: E experts, N ranks, S slots of a rank, M = N * S slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

_FAR = 1 << 20  # larger than any distance
_MOST_STEPS = 4096  # uneven loads take about 10 steps; the maximum observed is 50


class ReplicaMap(NamedTuple):
    """Index from experts to the slots of all ranks that hold them."""

    class_NS: jax.Array  # int32
    slot_M: jax.Array  # int32, the slots sorted by expert
    position_M: jax.Array  # int32, the position of each slot in that order
    first_M: jax.Array  # int32, for each position the first position of the same expert
    last_M: jax.Array  # int32, for each position the last position of the same expert

    @classmethod
    def of(cls, placement_NS: Int[Array, "N S"]) -> "ReplicaMap":
        """Builds the map for a placement, in which experts may be in any order."""
        class_M = placement_NS.reshape(-1).astype(jnp.int32)
        slot_M = jnp.argsort(class_M, stable=True).astype(jnp.int32)
        position_M = jnp.argsort(slot_M).astype(jnp.int32)
        sorted_M = class_M[slot_M]
        first_M = jnp.searchsorted(sorted_M, sorted_M, side="left").astype(jnp.int32)
        last_M = jnp.searchsorted(sorted_M, sorted_M, side="right").astype(jnp.int32) - 1
        return cls(placement_NS.astype(jnp.int32), slot_M, position_M, first_M, last_M)

    def sums(self, values_NS: Int[Array, "N S"]) -> tuple[Int[Array, "N S"], Int[Array, "N S"]]:
        """Sums the values in the same expert's slots, for every slot: those before it, and all of them."""
        sorted_M = values_NS.reshape(-1)[self.slot_M]
        up_to_M = jnp.cumsum(sorted_M, dtype=jnp.int32)
        before_M = up_to_M - sorted_M
        start_M = before_M[self.first_M]
        before_NS, all_NS = (
            sums_M[self.position_M].reshape(values_NS.shape)
            for sums_M in (before_M - start_M, up_to_M[self.last_M] - start_M)
        )
        return before_NS, all_NS


class _Flow(NamedTuple):
    """State of the search for a balanced flow."""

    tokens_NS: jax.Array  # int32, tokens of each slot
    level: jax.Array  # int32[], lower bound of the largest load
    amount: jax.Array  # int32[], number of tokens that a path must carry at least
    step: jax.Array  # int32[]


class _Bounds(NamedTuple):
    """Limits of the search at a level, int32[] each."""

    highest: jax.Array  # load; the search ends when no rank has more
    aim: jax.Array  # load; a rank above it passes on the excess, a rank below it has room
    least_amount: jax.Array  # smallest number of tokens that a path must carry

    @classmethod
    def of(cls, level: jax.Array, num_slots: int) -> "_Bounds":
        # Without slack the last few tokens would take most of the steps. If no rank has room even for a path of
        # ``least_amount``, every load is at least the level.
        aim, slack = level + (level >> 11) + (num_slots - 1) // 2, (level >> 10) + num_slots - 1
        return cls(level + slack, aim, jnp.maximum(level >> 12, 1))


def balance(tokens_E: Int[Array, " E"], holders: ReplicaMap) -> Int[Array, "N S"]:
    """Divides the tokens of every expert among the slots that hold it.

    No rank gets more than 1.001 times the smallest possible maximum load, plus one token for each of its slots.

    Args:
        tokens_E: int32, (token, choice) pairs of each expert; their sum is below 2^30.
        holders: slots of all ranks; every expert has at least one.

    Returns:
        int32[N, S], tokens of each slot.

    >>> balance(jnp.array([60, 30, 10]), ReplicaMap.of(jnp.array([[0, 0], [0, 1], [2, 1]]))).tolist()
    [[14, 20], [26, 8], [10, 22]]
    """
    num_slots = holders.class_NS.shape[1]
    tokens_NS = tokens_E[holders.class_NS]
    before_NS, count_NS = holders.sums(tokens_NS * 0 + 1)
    even_NS = tokens_NS // count_NS + (before_NS < tokens_NS % count_NS).astype(jnp.int32)
    load_N = _by_rank(even_NS)
    level = _mean(load_N, load_N * 0 + 1)
    first = _Flow(even_NS, level, jnp.maximum(level - jnp.min(load_N), 1) // 2, level * 0)

    def is_uneven(flow: _Flow) -> jax.Array:
        highest = _Bounds.of(flow.level, num_slots).highest
        return (jnp.max(_by_rank(flow.tokens_NS)) > highest) & (flow.step < _MOST_STEPS)

    return lax.while_loop(is_uneven, lambda flow: _step(flow, holders), first).tokens_NS


def shift_overflow(tokens_NS: Int[Array, "N S"], room: int, holders: ReplicaMap) -> Int[Array, "N S"]:
    """Moves tokens from overloaded ranks to replicas with free rows, until no further token can be served.

    This is a maximum flow: the search ends when no overloaded rank has a path to a rank with room. It takes only a few
    steps if the tokens are already nearly balanced.

    Args:
        tokens_NS: int32, tokens of each slot, from ``balance``.
        room: tokens that a rank can serve.
        holders: slots of all ranks.

    Returns:
        int32[N, S], tokens of each slot after the moves.

    >>> holders = ReplicaMap.of(jnp.array([[0, 1], [0, 2], [2, 3]]))
    >>> shift_overflow(jnp.array([[11, 0], [0, 9], [0, 7]]), room=9, holders=holders).tolist()
    [[9, 0], [2, 7], [2, 7]]
    """

    def search(tokens_NS: jax.Array, step: jax.Array) -> _Search:
        load_N = _by_rank(tokens_NS)
        paths = _find_paths(tokens_NS > 0, load_N < room, load_N > room, holders)
        return _Search(tokens_NS, paths, jnp.any((load_N > room) & (paths.distance_N < _FAR)), step)

    def pass_on(flow: _Search) -> _Search:
        aim, at_least = jnp.asarray(room, jnp.int32), jnp.ones((), jnp.int32)
        return search(_push(flow.tokens_NS, flow.paths, aim, at_least, holders), flow.step + 1)

    def goes_on(flow: _Search) -> jax.Array:
        return flow.has_path & (flow.step < _MOST_STEPS)

    return lax.while_loop(goes_on, pass_on, search(tokens_NS, tokens_NS[0, 0] * 0)).tokens_NS


def _step(flow: _Flow, holders: ReplicaMap) -> _Flow:
    """Runs one step of the search: moves tokens, raises the level, or reduces the amount that paths must carry."""
    bounds = _Bounds.of(flow.level, holders.class_NS.shape[1])
    load_N, amount = _by_rank(flow.tokens_NS), jnp.maximum(flow.amount, bounds.least_amount)
    is_least = amount <= bounds.least_amount
    at_least, is_over_N = jnp.where(is_least, 1, amount), load_N > bounds.highest
    paths = _find_paths(flow.tokens_NS >= at_least, bounds.aim - load_N >= amount, is_over_N, holders)
    is_cut_N = paths.distance_N >= _FAR

    def relax() -> tuple[jax.Array, jax.Array, jax.Array]:
        level = jnp.where(is_least, _mean(load_N, is_cut_N.astype(jnp.int32)), flow.level)
        return flow.tokens_NS, level, jnp.where(is_least, amount, amount // 4)

    def push() -> tuple[jax.Array, jax.Array, jax.Array]:
        return _push(flow.tokens_NS, paths, bounds.aim, at_least, holders), flow.level, amount

    tokens_NS, level, amount = lax.cond(jnp.any(is_cut_N & is_over_N), relax, push)
    return _Flow(tokens_NS, level, amount, flow.step + 1)


class _Paths(NamedTuple):
    """Distance of each rank to the nearest rank with room, in ranks; ``_FAR`` if there is no path, or none was needed.

    The search stops when all overloaded ranks have a distance. An expert's distance is one more than the smallest
    distance of a rank that holds it: the distance of a rank that passes on the expert's tokens.
    """

    distance_N: jax.Array  # int32
    class_distance_NS: jax.Array  # int32, of each slot's expert


class _Search(NamedTuple):
    """State of the maximum flow from ranks with more tokens than room."""

    tokens_NS: jax.Array  # int32, tokens of each slot
    paths: _Paths
    has_path: jax.Array  # bool[]
    step: jax.Array  # int32[]


def _find_paths(is_open_NS: jax.Array, has_room_N: jax.Array, is_over_N: jax.Array, holders: ReplicaMap) -> _Paths:
    start_N = jnp.where(has_room_N, 0, _FAR)
    start = _Paths(start_N, jnp.broadcast_to(start_N[:, None], is_open_NS.shape) * 0 + _FAR)

    def goes_on(search: tuple[_Paths, jax.Array, jax.Array]) -> jax.Array:
        paths, _, has_grown = search
        return has_grown & jnp.any(is_over_N & (paths.distance_N >= _FAR))

    def widen(search: tuple[_Paths, jax.Array, jax.Array]) -> tuple[_Paths, jax.Array, jax.Array]:
        (distance_N, class_distance_NS), distance, _ = search
        is_near_NS = jnp.broadcast_to((distance_N < distance)[:, None], is_open_NS.shape)
        _, near_NS = holders.sums(is_near_NS.astype(jnp.int32))
        class_distance_NS = jnp.where(near_NS > 0, jnp.minimum(class_distance_NS, distance), class_distance_NS)
        is_reached_N = jnp.any(is_open_NS & (near_NS > 0), axis=1) & (distance_N >= _FAR)
        distance_N = jnp.where(is_reached_N, distance, distance_N)
        return _Paths(distance_N, class_distance_NS), distance + 1, jnp.any(is_reached_N)

    return lax.while_loop(goes_on, widen, (start, jnp.min(start_N) * 0 + 1, jnp.any(is_over_N)))[0]


def _push(tokens_NS: jax.Array, paths: _Paths, aim: jax.Array, at_least: jax.Array, holders: ReplicaMap) -> jax.Array:
    """Moves the excess over ``aim`` along the paths, one distance at a time, starting with the farthest ranks."""
    distance_N1, class_distance_NS = paths.distance_N[:, None], paths.class_distance_NS

    def movable(tokens_NS: jax.Array, distance: jax.Array) -> jax.Array:
        is_way_NS = (class_distance_NS == distance) & (distance_N1 == distance) & (tokens_NS >= at_least)
        return jnp.where(is_way_NS, tokens_NS, 0)

    def pass_on(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens_NS, distance = at
        load_N = _by_rank(tokens_NS)
        over_N = jnp.maximum(load_N - aim, 0)
        offered_NS = _first(movable(tokens_NS, distance), over_N)
        offered_before_NS, offered_all_NS = holders.sums(offered_NS)
        # A rank with room takes at most as many tokens as fit; an intermediate rank takes as many as it can pass on.
        further_N = _by_rank(movable(tokens_NS, distance - 1)) - over_N
        room_N = jnp.where(distance == 1, jnp.maximum(aim - load_N, 0), jnp.maximum(further_N, 1))
        wanted_NS = _first(jnp.where(distance_N1 == distance - 1, offered_all_NS, 0), room_N)
        wanted_before_NS, wanted_all_NS = holders.sums(wanted_NS)
        moved_NS = jnp.minimum(offered_all_NS, wanted_all_NS)
        given_NS = jnp.clip(moved_NS - offered_before_NS, 0, offered_NS)
        taken_NS = jnp.clip(moved_NS - wanted_before_NS, 0, wanted_NS)
        return tokens_NS + taken_NS - given_NS, distance - 1

    is_over_N = (_by_rank(tokens_NS) > aim) & (paths.distance_N < _FAR)
    farthest = jnp.max(jnp.where(is_over_N, paths.distance_N, 0))
    return lax.while_loop(lambda at: at[1] > 0, pass_on, (tokens_NS, farthest))[0]


def _first(amounts_NS: jax.Array, limit_N: jax.Array) -> jax.Array:
    """Takes each rank's amounts in slot order until their sum reaches its limit."""
    before_NS = jnp.cumsum(amounts_NS, axis=1, dtype=jnp.int32) - amounts_NS
    return jnp.clip(limit_N[:, None] - before_NS, 0, amounts_NS)


def _by_rank(tokens_NS: jax.Array) -> jax.Array:
    return jnp.sum(tokens_NS, axis=1, dtype=jnp.int32)


def _mean(load_N: jax.Array, counted_N: jax.Array) -> jax.Array:
    """Computes the mean load of the counted ranks, rounded up."""
    count = jnp.maximum(jnp.sum(counted_N, dtype=jnp.int32), 1)
    return (jnp.sum(load_N * counted_N, dtype=jnp.int32) + count - 1) // count
