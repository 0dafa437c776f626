"""Placement and token split as a library: functions from NumPy arrays to NumPy arrays, without trainer or mesh.

    from swift.experts.placement import place_experts, rank_loads, split_tokens

    placement_LNS = place_experts(loads_LE, num_ranks=64, slots_per_rank=6)  # the expert in every slot
    tokens_NNS = split_tokens(counts_NE, placement_LNS[0])  # from every source rank to every slot

Each function is compiled once for each combination of shapes.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from swift.errors import LEAST_NUMBER, MOST_NUMBER, SettingError
from swift.experts.capacity.balanced_flow import ReplicaMap, balance
from swift.experts.capacity.token_split import by_source
from swift.experts.placement.packed import Packed
from swift.experts.placement.policy import PlacementPolicy, PolicyState

_MOST = 1 << 29
"""Maximum sum of a layer's loads as int32; fractional loads and larger sums are scaled to it."""


def place_experts(
    loads_LE: np.ndarray, num_ranks: int, slots_per_rank: int, policy: PlacementPolicy | None = None
) -> Int[np.ndarray, "L N S"]:
    """Places the experts of every layer according to their loads.

    Args:
        loads_LE: load of each expert, such as its number of tokens, in any unit; ``[E]`` is one layer.
        num_ranks: number of expert ranks, N.
        slots_per_rank: slots of a rank, S.
        policy: placement policy, called once on its initial placement; None for ``Packed()``.

    Returns:
        int32[L, N, S], the expert in every slot.

    Raises:
        SettingError: the loads are invalid, or there are fewer slots than experts.

    >>> place_experts(np.array([40.0, 30.0, 20.0, 10.0]), num_ranks=2, slots_per_rank=2).tolist()
    [[[0, 3], [1, 2]]]
    """
    loads_LE = check_loads(loads_LE)
    policy = Packed() if policy is None else policy
    num_layers, num_classes = loads_LE.shape
    placement_LNS, state = policy.init(num_layers, num_classes, num_ranks, slots_per_rank)
    return np.asarray(_decide(policy, _whole(loads_LE), placement_LNS, state))


def rank_loads(
    loads_LE: np.ndarray, placement_LNS: Int[np.ndarray, "L N S"], *, evenly: bool = False
) -> Float[np.ndarray, "L N"]:
    """Computes each rank's load, with every expert's load divided among its replicas.

    Args:
        loads_LE: load of each expert, such as its number of tokens, in any unit; ``[E]`` is one layer.
        placement_LNS: the expert in every slot; every expert has at least one.
        evenly: whether all replicas of an expert get the same load; otherwise the split minimizes the load of the
            fullest rank.

    >>> placement_LNS = np.array([[[0, 1], [0, 2]]])
    >>> rank_loads(np.array([60, 30, 10]), placement_LNS, evenly=True).tolist()
    [[60.0, 40.0]]
    >>> rank_loads(np.array([60, 30, 10]), placement_LNS).tolist()
    [[50.0, 50.0]]
    """
    loads_LE = check_loads(loads_LE)
    if evenly:
        shares = [
            (load_E / np.maximum(np.bincount(slots_NS.ravel(), minlength=load_E.size), 1))[slots_NS]
            for load_E, slots_NS in zip(loads_LE, placement_LNS, strict=True)
        ]
        return np.stack(shares).sum(axis=2)
    whole_LE = _whole(loads_LE)
    tokens_LNS = np.asarray(_balanced(whole_LE, np.asarray(placement_LNS, np.int32)), float)
    scale_L1 = loads_LE.sum(axis=1, keepdims=True) / np.maximum(whole_LE.sum(axis=1, keepdims=True), 1)
    return tokens_LNS.sum(axis=2) * scale_L1


def split_tokens(counts_NE: np.ndarray, placement_NS: Int[np.ndarray, "N S"]) -> Int[np.ndarray, "N N S"]:
    """Splits the tokens of every source rank and expert over the expert's replicas, in whole tokens.

    The fullest rank gets at most 1.001 times the smallest possible maximum load, plus one token for each of its slots.
    Each slot gets nearly the same share of its expert's tokens from all sources.

    Args:
        counts_NE: tokens of every source rank for each expert; their sum is below 2^30.
        placement_NS: the expert in every slot; every expert has at least one.

    Returns:
        int32[N, N, S]: number of tokens from every source to every slot.

    >>> split_tokens(np.array([[8, 0], [4, 4]]), np.array([[0], [1]])).tolist()
    [[[8], [0]], [[4], [4]]]
    """
    counts_NE, placement_NS = (np.asarray(array) for array in (counts_NE, placement_NS))
    check_loads(counts_NE)
    if not np.issubdtype(counts_NE.dtype, np.integer) or counts_NE.sum() >= 1 << 30:
        raise SettingError("counts", f"{counts_NE.dtype}, sum {counts_NE.sum()}", "must be integers, below 2^30 in all")
    split_NM = _split(counts_NE.astype(np.int32), placement_NS.astype(np.int32))
    return np.asarray(split_NM).reshape(len(counts_NE), *placement_NS.shape)


def check_loads(loads: np.ndarray) -> Float[np.ndarray, "L E"]:
    """Checks loads and returns them as float ``[L, E]``.

    Raises:
        SettingError: the loads are not numbers ``[E]`` or ``[L, E]``, or are out of range.
    """
    array = np.asarray(loads)
    shape = f"{array.dtype}{list(array.shape)}"
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or not array.size:
        raise SettingError("loads", shape, "must be numbers [experts], or [layers, experts]")
    array = np.atleast_2d(array).astype(float)
    if not np.isfinite(array).all() or array.min() < 0:
        raise SettingError("loads", shape, "must be finite, and none below 0")
    if 0 < array.max() < LEAST_NUMBER:  # loads are scaled to whole numbers
        raise SettingError("loads", shape, f"must be at least {LEAST_NUMBER:g}, or all 0")
    if array.max() > MOST_NUMBER:  # sums of loads have to be finite, too
        raise SettingError("loads", shape, f"must be at most {MOST_NUMBER:g} each")
    return array


def _whole(loads_LE: np.ndarray) -> Int[np.ndarray, "L E"]:
    """Converts loads to int32: unchanged if they are whole and small enough, otherwise scaled."""
    is_whole = np.array_equal(loads_LE, np.floor(loads_LE)) and loads_LE.sum(axis=1).max() <= _MOST
    if is_whole:
        return loads_LE.astype(np.int32)
    scale_L1 = _MOST / np.maximum(loads_LE.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.floor(loads_LE * scale_L1).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _decide(policy: PlacementPolicy, loads_LE: jax.Array, placement_LNS: jax.Array, state: PolicyState) -> jax.Array:
    return policy(loads_LE, placement_LNS, state)[0]


@jax.jit
@jax.vmap
def _balanced(tokens_E: jax.Array, placement_NS: jax.Array) -> jax.Array:
    return balance(tokens_E, ReplicaMap.of(placement_NS))


@jax.jit
def _split(counts_NE: jax.Array, placement_NS: jax.Array) -> jax.Array:
    holders = ReplicaMap.of(placement_NS)
    return by_source(counts_NE, balance(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), holders), holders)
