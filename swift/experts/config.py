"""Expert-layer configuration, its three kinds of capacity, and the buffer sizes that they determine.

Throughout, ``local_tokens`` is the number of tokens of a micro-batch on one rank.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp

from swift.errors import SettingError, check_choices, check_count, check_number
from swift.experts.routers import TopK
from swift.experts.routing import Router, RouterTokens, Routing

_PARTS = 8
"""Ratio of the buffer size in the first round of an exchange to the buffer size in each further round."""
_ONCE = Fraction(6, 10)
"""Largest expected number of distinct ranks per choice at which tokens are deduplicated (measured on a CPU)."""
_MOST_EXPERTS = 2**16
_MOST_ROOM = 1e6
"""Upper limits: the first for experts, slots and ``min_capacity``, the second for ``factor`` and ``headroom``."""


class Buffers(NamedTuple):
    """Rows that one rank sends to another in each round of an exchange."""

    first: int
    further: int | None  # in each round after the first; None if there is only one round


class _Capacity:
    """Defaults shared by most kinds of capacity."""

    factor: float | None = 1.0
    """Rows as a multiple of a fair share of the tokens; None for room for all tokens."""
    rules: Literal["swift", "deepspeed"] = "swift"
    fetches_weights: ClassVar[bool] = False
    """Whether slots are reassigned in every micro-batch, so that each layer has to fetch their weights."""

    @property
    def follows_deepspeed(self) -> bool:
        """Whether drops, gates and the auxiliary loss follow DeepSpeed's rules."""
        return self.rules == "deepspeed"

    def check(self, experts: "ExpertConfig") -> None:
        """Raises SettingError if this capacity is incompatible with other settings of the experts."""

    def check_slots(self, experts: "ExpertConfig", num_ranks: int) -> None:
        """Raises SettingError if this capacity needs more slots than one per expert and there are too few."""

    def least_slots(self, num_classes: int, num_ranks: int) -> int:
        """Returns the minimum number of slots per rank."""
        return -(-num_classes // num_ranks)

    def _check_factor(self) -> None:
        if self.factor is not None:
            check_number(f"{type(self).__name__}.factor", self.factor, above=0, most=_MOST_ROOM)

    def _all_choices(self, experts: "ExpertConfig", local_tokens: int) -> Fraction:
        # Exact arithmetic: in floating point 1.1 * 100 / 10 is a little over 11, and its ceiling would be 12.
        return Fraction(str(self.factor)) * local_tokens * experts.top_k


@dataclass(frozen=True)
class SlotCapacity(_Capacity):
    """Capacity in which every slot has its own rows, as in SYMI.

    Attributes:
        factor: rows of a slot as a multiple of its fair share of the tokens. With None every slot has room for all
            tokens of a rank, so that no token is ever dropped (at the cost of mostly empty rows).
        rules: ``swift``, or ``deepspeed`` for the rules of DeepSpeed's top-1 and top-2 gates: capacity is per expert
            and at least ``min_capacity`` tokens, all first choices come before any second one, gates are normalized
            after drops, and the auxiliary loss counts only first choices.
        min_capacity: with DeepSpeed's rules, minimum number of tokens that an expert accepts from one source rank.
    """

    factor: float | None = 1.0
    rules: Literal["swift", "deepspeed"] = "swift"
    min_capacity: int = 4

    def __post_init__(self) -> None:
        self._check_factor()
        check_choices(self)
        check_count("SlotCapacity.min_capacity", self.min_capacity, least=0, most=_MOST_EXPERTS)

    def check(self, experts: "ExpertConfig") -> None:
        """Raises SettingError if DeepSpeed's rules apply and do not allow the router settings."""
        if not self.follows_deepspeed:
            return
        if not isinstance(experts.router, TopK):
            text = "must be @TopK() with SlotCapacity.rules = 'deepspeed'"
            raise SettingError("ExpertConfig.router", experts.router, text)
        allowed = (
            *((f"TopK.{field.name}", getattr(experts.router, field.name), (field.default,)) for field in fields(TopK)),
            ("ExpertConfig.z_loss_coefficient", experts.z_loss_coefficient, (0.0,)),
            ("ExpertConfig.top_k", experts.top_k, (1, 2)),
        )
        for setting, value, values in allowed:
            if value not in values:
                text = f"must be {' or '.join(map(repr, values))} with SlotCapacity.rules = 'deepspeed'"
                raise SettingError(setting, value, text)

    def rows_per_class(self, experts: "ExpertConfig", local_tokens: int) -> int | None:
        """Tokens that one source rank may send to an expert by DeepSpeed's rules; None if only the slots limit them."""
        if not self.follows_deepspeed:
            return None
        if self.factor is None:
            return local_tokens
        share = math.ceil(self._all_choices(experts, local_tokens) / experts.num_classes)
        return min(max(share, self.min_capacity), local_tokens)

    def rows_per_slot(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> int:
        """Rows C that one source rank may fill in a slot."""
        class_rows, num_slots = self.rows_per_class(experts, local_tokens), experts.slots_per_rank * num_ranks
        if class_rows is not None:
            return math.ceil(class_rows / max(num_slots // experts.num_classes, 1))
        if self.factor is None:
            return local_tokens
        return math.ceil(self._all_choices(experts, local_tokens) / num_slots)

    def rows_sent(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int, *, at_once: bool = False) -> int:
        """Rows that one source rank sends to all ranks, including itself: all rows of all slots, full or empty."""
        del at_once
        return num_ranks * experts.slots_per_rank * self.rows_per_slot(experts, local_tokens, num_ranks)

    def rows_travelling(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> float:
        """Rows that a rank sends; with capacity by slot they do not depend on the load."""
        return self.rows_sent(experts, local_tokens, num_ranks)


class _SharedRows(_Capacity):
    """Base class for kinds of capacity in which a rank's slots share its rows: computes the row counts."""

    spare_rounds: int | None = None
    """Rounds of splitting; None for an exact split, in which no row is dropped because a buffer is full."""
    headroom: float

    def rows_per_rank(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> int:
        """Rows R that a rank's slots share."""
        if self.factor is None:
            return num_ranks * experts.most_pairs(local_tokens)
        return math.ceil(self._all_choices(experts, local_tokens))

    def rows_per_buffer(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> int:
        """Rows Q that one source rank may send to one rank."""
        if self.factor is None:
            return experts.most_pairs(local_tokens)
        even = Fraction(self.rows_per_rank(experts, local_tokens, num_ranks), num_ranks)
        return max(math.ceil(even), math.floor(even * Fraction(str(self.headroom))))

    def deduplicates_tokens(self, experts: "ExpertConfig", num_ranks: int) -> bool:
        """Whether a token is sent to a rank only once, rather than once for each of its experts there.

        False if most of a token's experts are on different ranks: copying and summing rows at the receiver would then
        cost more than the smaller exchange saves.
        """
        return experts.ranks_of_token(num_ranks) <= _ONCE * experts.top_k

    def buffers(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> Buffers:
        """Returns the buffer sizes, in rows, for the rounds of an exchange between two ranks.

        With rounds of splitting (``spare_rounds``), rows that do not fit into the buffer are dropped; otherwise they
        are sent in further rounds of the exchange.
        """
        first, has_limit = self.rows_per_buffer(experts, local_tokens, num_ranks), self.spare_rounds is not None
        most = experts.most_pairs(local_tokens)
        if self.deduplicates_tokens(experts, num_ranks):
            even, most = local_tokens * experts.ranks_of_token(num_ranks) / num_ranks, local_tokens
            first = min(first, most if has_limit else math.ceil(even * Fraction(str(self.headroom))), most)
        if has_limit or first >= most:
            return Buffers(first, None)
        return Buffers(first, math.ceil(first / _PARTS))

    def rows_sent(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int, *, at_once: bool = False) -> int:
        """Rows that one source rank sends to all ranks, including itself, for a micro-batch.

        If the exchange takes several rounds, only the first is counted. With ``at_once`` (``ragged_all_to_all``) ranks
        send only real rows, and the result is an upper bound: all rows of the sender, or all rows that the receiver
        has room for, whichever is less.
        """
        if at_once:
            is_once = self.deduplicates_tokens(experts, num_ranks)
            most = num_ranks * local_tokens if is_once else experts.most_pairs(local_tokens)
            return min(most, self.rows_per_rank(experts, local_tokens, num_ranks))
        return num_ranks * self.buffers(experts, local_tokens, num_ranks).first

    def rows_travelling(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> float:
        """Expected rows that a rank sends with ``at_once``, if experts are on random ranks and no token is dropped."""
        most = self.rows_sent(experts, local_tokens, num_ranks, at_once=True)
        if not self.deduplicates_tokens(experts, num_ranks):
            return most
        return min(float(local_tokens * experts.ranks_of_token(num_ranks)), most)


@dataclass(frozen=True)
class RankCapacity(_SharedRows):
    """Capacity in which the slots of a rank share its rows.

    Attributes:
        factor: rows of a rank as a multiple of its fair share of the tokens. With None every rank has room for all
            tokens of all ranks, so that no token is ever dropped.
        spare_rounds: number of rounds that shift the split of an expert's tokens over its replicas towards ranks with
            spare room; 0 splits evenly, None computes the best split.
        headroom: rows that one rank can send to another, as a multiple of an even share. On CPU, the token exchange
            costs this many times as much as with capacity by slot. With ``spare_rounds`` = None it sizes only the first
            of several rounds of the exchange, which together move all rows; TPU and GPU need only one round.
    """

    factor: float | None = 1.0
    spare_rounds: int | None = 8
    headroom: float = 1.25

    def __post_init__(self) -> None:
        self._check_factor()
        if self.spare_rounds is not None:
            check_count("RankCapacity.spare_rounds", self.spare_rounds, least=0, most=_MOST_EXPERTS)
        check_number("RankCapacity.headroom", self.headroom, least=1, most=_MOST_ROOM)


@dataclass(frozen=True)
class ExactCapacity(_SharedRows):
    """Capacity that reassigns slots in every micro-batch, after routing, so that no token is dropped.

    Every rank gets an even share of the tokens. The placement has no effect.

    Attributes:
        headroom: buffer size in the first of several rounds of the exchange, which together move all rows, as a
            multiple of an even share; TPU and GPU need only one round and no buffers.
    """

    headroom: float = 1.25
    fetches_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("ExactCapacity.headroom", self.headroom, least=1, most=_MOST_ROOM)

    def rows_per_rank(self, experts: "ExpertConfig", local_tokens: int, num_ranks: int) -> int:
        """Rows R that a rank's slots share: as many as a rank has choices at most."""
        del num_ranks
        return experts.most_pairs(local_tokens)

    def check_slots(self, experts: "ExpertConfig", num_ranks: int) -> None:
        """Raises SettingError if there are too few slots to share every possible load evenly."""
        enough = self.least_slots(experts.num_classes, num_ranks)
        if experts.slots_per_rank < enough:
            sizes = f"for {experts.num_classes} experts on {num_ranks} expert ranks"
            rule = "slots * ranks must be at least experts + ranks - 1"
            allowed = f"at least {enough} with ExpertConfig.capacity = @ExactCapacity(), {sizes}: {rule}"
            raise SettingError("ExpertConfig.slots_per_rank", experts.slots_per_rank, allowed)

    def least_slots(self, num_classes: int, num_ranks: int) -> int:
        """Returns the minimum number of slots per rank with which every load can be shared evenly.

        >>> [ExactCapacity().least_slots(*sizes) for sizes in ((8, 8), (9, 8), (5, 1))]
        [2, 2, 5]
        """
        return -(-(num_classes + num_ranks - 1) // num_ranks)


Capacity: TypeAlias = SlotCapacity | RankCapacity | ExactCapacity
"""Rule that decides how many rows there are and which tokens are dropped; ``layer`` has the dispatch of each kind."""


@dataclass(frozen=True)
class ExpertConfig:
    """Settings for the experts in a mixture-of-experts layer.

    Attributes:
        num_classes: number of logical experts, E (SYMI's expert classes).
        slots_per_rank: slots on each expert rank, S; a slot holds the weights of one replica.
        top_k: experts that each token is sent to; on average, for a router with a varying number.
        capacity: rule for the rows that hold tokens; a token without a row is dropped. ``@SlotCapacity()`` gives every
            slot its own rows, ``@RankCapacity()`` lets the slots of a rank share its rows, and ``@ExactCapacity()``
            drops no token.
        aux_loss_coefficient: weight of the router's auxiliary loss, by default a load-balancing loss.
        z_loss_coefficient: weight of the router's z-loss, which keeps its logits small.
        router: rule that chooses the experts of each token: ``@TopK()``, ``@NoisyTopK()``, ``@Sinkhorn()``,
            ``@ExpertChoice()``, or your own.
    """

    num_classes: int = 8
    slots_per_rank: int = 4
    top_k: int = 1
    capacity: Capacity = SlotCapacity()
    aux_loss_coefficient: float = 1e-5
    z_loss_coefficient: float = 0.0
    router: Router = field(default_factory=TopK)

    def __post_init__(self) -> None:
        for name in ("num_classes", "slots_per_rank", "top_k"):
            check_count(f"ExpertConfig.{name}", getattr(self, name), least=1, most=_MOST_EXPERTS)
        if self.top_k > self.num_classes:
            allowed = f"a token cannot go to more than ExpertConfig.num_classes = {self.num_classes} experts"
            raise SettingError("ExpertConfig.top_k", self.top_k, allowed)
        if not isinstance(self.capacity, Capacity):
            kinds = " or ".join(f"@{kind.__name__}()" for kind in get_args(Capacity))
            raise SettingError("ExpertConfig.capacity", self.capacity, f"must be {kinds}")
        for name in ("aux_loss_coefficient", "z_loss_coefficient"):
            check_number(f"ExpertConfig.{name}", getattr(self, name), least=0)
        if not isinstance(self.router, Router) or not is_dataclass(self.router):
            allowed = "must be a router, such as @TopK(): a dataclass that inherits from swift.experts.Router"
            raise SettingError("ExpertConfig.router", self.router, allowed)
        self.router.check(self.num_classes, self.top_k)
        self.capacity.check(self)

    def route(self, tokens: RouterTokens, *, alone: bool = False) -> Routing:
        """Chooses the experts of a rank's tokens; ``alone`` for generation, see ``Router.route_alone``.

        Logits of fewer bits are converted to float32.
        """
        router, logits_TX = self.router, tokens.logits_TX
        tokens = tokens._replace(logits_TX=logits_TX.astype(jnp.promote_types(logits_TX.dtype, jnp.float32)))
        if alone:
            router.check_generates()
        if self.capacity.follows_deepspeed and isinstance(router, TopK):
            router = replace(router, normalize_gates=False)  # DeepSpeed normalizes after drops
        return (router.route_alone if alone else router.route)(tokens, self.num_classes, self.top_k)

    def most_pairs(self, local_tokens: int) -> int:
        """Returns the largest number of (token, choice) pairs of a rank."""
        return self.router.most_pairs(local_tokens, self.num_classes, self.top_k)

    @property
    def most_choices(self) -> int:
        """Largest number of experts that a token may have, K."""
        return self.router.most_choices(self.num_classes, self.top_k)

    @property
    def auxiliary_weight(self) -> float:
        """Weight of the auxiliary loss, which sums load-balancing loss and z-loss, scaled by ``auxiliary_shares``."""
        return self.aux_loss_coefficient or self.z_loss_coefficient

    @property
    def auxiliary_shares(self) -> tuple[float, float]:
        """Factors of the load-balancing loss and the z-loss in the auxiliary loss."""
        if not self.z_loss_coefficient:
            return 1.0, 0.0
        return self.aux_loss_coefficient / self.auxiliary_weight, self.z_loss_coefficient / self.auxiliary_weight

    def ranks_of_token(self, num_ranks: int) -> Fraction:
        """Expected number of distinct ranks that hold a token's experts, if each expert is on a random rank."""
        return num_ranks * (1 - Fraction(num_ranks - 1, num_ranks) ** self.top_k)
