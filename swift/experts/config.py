"""Configuration of an expert layer, and the buffer sizes that follow from it."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from swift.errors import SettingError, check_count, check_number
from swift.experts.routing import Gating

_PARTS = 8
"""Ratio of the rows in an exchange's first round to the rows in a further round."""
_ONCE = Fraction(6, 10)
"""Tokens are deduplicated if a token's experts are on at most this many ranks per choice (measured on a CPU)."""
_MOST_EXPERTS = 2**16
_MOST_ROOM = 1e6
"""Upper limits: for experts, slots and ``min_capacity``; and for ``capacity_factor`` and ``headroom``."""


class Buffers(NamedTuple):
    """Rows that one rank sends to another in each round of an exchange."""

    first: int
    further: int | None  # in each round after the first; None: there is only one round


@dataclass(frozen=True)
class ExpertConfig:
    """Experts in a mixture-of-experts layer.

    Attributes:
        num_classes: number of logical experts, E (SYMI's expert classes).
        slots_per_rank: slots on each expert rank, S; a slot holds the weights of one replica.
        top_k: experts that each token is sent to.
        capacity_factor: rows of a slot as a multiple of its fair share of the tokens. With None every slot has room for
            all tokens of a rank, so that no token is ever dropped (at the cost of mostly empty rows).
        aux_loss_coefficient: weight of the load-balancing loss.
        z_loss_coefficient: weight of the router's z-loss, which keeps its logits small.
        bias_update_rate: step by which an expert's bias moves after an iteration, with ``ModelConfig.router_bias``.
        capacity: ``slot`` gives every slot its own rows, as in SYMI; with ``rank`` the slots of a rank share the same
            total number of rows. ``exact`` reassigns the slots in every micro-batch, after routing, so that every rank
            gets an even share of the tokens and none is dropped; placements and ``capacity_factor`` then have no
            effect.
        spare_rounds: with ``rank``, rounds that scale the split of an expert's tokens over its replicas towards ranks
            with spare room; 0 splits evenly, None computes the best split.
        headroom: with ``rank``, rows that one rank can send to another, as a multiple of an even share; on CPU, the
            extra cost of the token exchange compared with ``slot``. With ``spare_rounds`` = None it sizes only the
            first of several rounds of the exchange, which together move all rows; TPU and GPU need no rounds.
        rules: ``swift``, or ``deepspeed`` for the rules of DeepSpeed's top-1 and top-2 gates: capacity per expert, at
            least ``min_capacity`` tokens of it; all first choices before any second one; gates normalized after drops;
            and an auxiliary loss of first choices.
        min_capacity: with DeepSpeed's rules, lower limit of an expert's capacity for one source rank.
        scores: ``softmax`` of the router's logits over the experts, or each expert's own ``sigmoid``.
        normalize_gates: whether the gates of a token's experts are divided by their sum; None: if ``top_k`` is above 1.
        gate_scale: factor of the gates.
    """

    num_classes: int = 8
    slots_per_rank: int = 4
    top_k: int = 1
    capacity_factor: float | None = 1.0
    aux_loss_coefficient: float = 1e-5
    capacity: Literal["slot", "rank", "exact"] = "slot"
    spare_rounds: int | None = 8
    headroom: float = 1.25
    rules: Literal["swift", "deepspeed"] = "swift"
    min_capacity: int = 4
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_gates: bool | None = None
    gate_scale: float = 1.0
    z_loss_coefficient: float = 0.0
    bias_update_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("num_classes", "slots_per_rank", "top_k"):
            check_count(f"ExpertConfig.{name}", getattr(self, name), least=1, most=_MOST_EXPERTS)
        if self.top_k > self.num_classes:
            allowed = f"a token cannot go to more than ExpertConfig.num_classes = {self.num_classes} experts"
            raise SettingError("ExpertConfig.top_k", self.top_k, allowed)
        if self.capacity_factor is not None:
            check_number("ExpertConfig.capacity_factor", self.capacity_factor, above=0, most=_MOST_ROOM)
        for name in ("aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate"):
            check_number(f"ExpertConfig.{name}", getattr(self, name), least=0)
        if self.capacity not in ("slot", "rank", "exact"):
            raise SettingError("ExpertConfig.capacity", self.capacity, "choose one of slot, rank, exact")
        if self.spare_rounds is not None:
            check_count("ExpertConfig.spare_rounds", self.spare_rounds, least=0, most=_MOST_EXPERTS)
        check_number("ExpertConfig.headroom", self.headroom, least=1, most=_MOST_ROOM)
        _check_rules(self)
        if self.scores not in ("softmax", "sigmoid"):
            raise SettingError("ExpertConfig.scores", self.scores, "choose one of softmax, sigmoid")
        if self.normalize_gates not in (None, True, False):
            raise SettingError("ExpertConfig.normalize_gates", self.normalize_gates, "must be True, False or None")
        check_number("ExpertConfig.gate_scale", self.gate_scale, above=0)

    @property
    def is_deepspeed(self) -> bool:
        """Whether drops and gates follow DeepSpeed's rules."""
        return self.rules == "deepspeed"

    @property
    def is_exact(self) -> bool:
        """Whether slots are reassigned in every micro-batch."""
        return self.capacity == "exact"

    @property
    def gating(self) -> Gating:
        """Rule that turns the router's logits into gates."""
        normalize = False if self.is_deepspeed else self.normalize_gates  # DeepSpeed normalizes after drops
        return Gating(self.top_k, self.scores, normalize, self.gate_scale)

    @property
    def normalizes_gates(self) -> bool:
        """Whether a token's gates sum to ``gate_scale`` if no choice is dropped."""
        return self.top_k > 1 if self.is_deepspeed else self.gating.is_normalized

    def rows_per_class(self, local_tokens: int) -> int | None:
        """Tokens of an expert that one source rank may send, by DeepSpeed's rules; None: only the slots limit them."""
        if not self.is_deepspeed:
            return None
        if self.capacity_factor is None:
            return local_tokens
        return min(max(math.ceil(_all_choices(self, local_tokens) / self.num_classes), self.min_capacity), local_tokens)

    @property
    def auxiliary_weight(self) -> float:
        """Weight of the auxiliary loss: the load-balancing loss and the z-loss, mixed by ``auxiliary_shares``."""
        return self.aux_loss_coefficient or self.z_loss_coefficient

    @property
    def auxiliary_shares(self) -> tuple[float, float]:
        """Factors of the load-balancing loss and the z-loss in the auxiliary loss."""
        if not self.z_loss_coefficient:
            return 1.0, 0.0
        return self.aux_loss_coefficient / self.auxiliary_weight, self.z_loss_coefficient / self.auxiliary_weight

    def rows_per_slot(self, local_tokens: int, num_ranks: int) -> int:
        """Rows C that one source rank may fill in a slot, for a micro-batch with ``local_tokens`` tokens per rank."""
        class_rows = self.rows_per_class(local_tokens)
        if class_rows is not None:
            return math.ceil(class_rows / max(self.slots_per_rank * num_ranks // self.num_classes, 1))
        if self.capacity_factor is None:
            return local_tokens
        return math.ceil(_all_choices(self, local_tokens) / (self.slots_per_rank * num_ranks))

    def rows_per_rank(self, local_tokens: int, num_ranks: int) -> int:
        """Rows R that a rank's slots share, for a micro-batch with ``local_tokens`` tokens per rank."""
        if self.is_exact:
            return local_tokens * self.top_k
        if self.capacity_factor is None:
            return num_ranks * local_tokens * self.top_k
        return math.ceil(_all_choices(self, local_tokens))

    def rows_per_buffer(self, local_tokens: int, num_ranks: int) -> int:
        """Rows Q that one source rank may send to one rank, for a micro-batch with ``local_tokens`` tokens per rank."""
        if self.capacity_factor is None and not self.is_exact:
            return local_tokens * self.top_k
        even = Fraction(self.rows_per_rank(local_tokens, num_ranks), num_ranks)
        return max(math.ceil(even), math.floor(even * Fraction(str(self.headroom))))

    def ranks_of_token(self, num_ranks: int) -> Fraction:
        """Expected number of distinct ranks that hold a token's experts, if each expert is on a random rank."""
        return num_ranks * (1 - Fraction(num_ranks - 1, num_ranks) ** self.top_k)

    def deduplicates_tokens(self, num_ranks: int) -> bool:
        """Whether a token is sent to a rank once, instead of once for each expert there.

        False with capacity by slot, and where most of a token's experts are on different ranks: copying and summing
        rows at the receiver would then cost more than the exchange saves.
        """
        return self.capacity != "slot" and self.ranks_of_token(num_ranks) <= _ONCE * self.top_k

    def buffers(self, local_tokens: int, num_ranks: int) -> Buffers:
        """Returns the buffer sizes, in rows, for each round in the exchange between two ranks."""
        first = self.rows_per_buffer(local_tokens, num_ranks)
        most, has_limit = local_tokens * self.top_k, self.capacity == "rank" and self.spare_rounds is not None
        if self.deduplicates_tokens(num_ranks):
            even, most = local_tokens * self.ranks_of_token(num_ranks) / num_ranks, local_tokens
            first = min(first, most if has_limit else math.ceil(even * Fraction(str(self.headroom))), most)
        if has_limit or first >= most:
            return Buffers(first, None)
        return Buffers(first, math.ceil(first / _PARTS))

    def rows_sent(self, local_tokens: int, num_ranks: int, *, at_once: bool = False) -> int:
        """Rows that one source rank sends to all ranks, including itself, for a micro-batch.

        Where the exchange takes several rounds, only the first is counted. With ``at_once`` (``ragged_all_to_all``,
        never with capacity by slot) ranks send only real rows: the upper bound is then all rows of the sender, or all
        that the receiver has room for.
        """
        if self.capacity == "slot":
            return num_ranks * self.slots_per_rank * self.rows_per_slot(local_tokens, num_ranks)
        if at_once:
            rows_per_token = num_ranks if self.deduplicates_tokens(num_ranks) else self.top_k
            return min(local_tokens * rows_per_token, self.rows_per_rank(local_tokens, num_ranks))
        return num_ranks * self.buffers(local_tokens, num_ranks).first


def rows_travelling(config: ExpertConfig, local_tokens: int, num_ranks: int) -> float:
    """Expected rows that a rank sends at once, if a token's experts are on random ranks and no token is dropped."""
    most = config.rows_sent(local_tokens, num_ranks, at_once=True)
    if not config.deduplicates_tokens(num_ranks):
        return most
    return min(float(local_tokens * config.ranks_of_token(num_ranks)), most)


def _all_choices(config: ExpertConfig, local_tokens: int) -> Fraction:
    # Exact arithmetic: in floating point 1.1 * 100 / 10 is a little over 11, and its ceiling would be 12.
    return Fraction(str(config.capacity_factor)) * local_tokens * config.top_k


def _check_rules(config: ExpertConfig) -> None:
    if config.rules not in ("swift", "deepspeed"):
        raise SettingError("ExpertConfig.rules", config.rules, "choose one of swift, deepspeed")
    check_count("ExpertConfig.min_capacity", config.min_capacity, least=0, most=_MOST_EXPERTS)
    if config.rules == "swift":
        return
    fixed = {"capacity": "slot", "scores": "softmax", "normalize_gates": None, "z_loss_coefficient": 0.0}
    for name, only in fixed.items():
        if getattr(config, name) != only:
            allowed = f"must be {only!r} with ExpertConfig.rules = 'deepspeed'"
            raise SettingError(f"ExpertConfig.{name}", getattr(config, name), allowed)
    if config.top_k > 2:
        raise SettingError("ExpertConfig.top_k", config.top_k, "must be 1 or 2 with ExpertConfig.rules = 'deepspeed'")
