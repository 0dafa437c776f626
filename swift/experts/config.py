"""What an expert layer is made of, as settings."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from swift.errors import SettingError, check_count, check_number


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a mixture-of-experts layer.

    Attributes:
        num_classes: logical experts E.
        slots_per_rank: places for one expert's weights on each expert rank, S.
        top_k: classes a token is sent to.
        capacity_factor: rows of a slot as a multiple of its fair share of the tokens; None gives every slot room for
            all tokens of a rank, so that nothing is ever dropped (at the price of mostly empty rows).
        aux_loss_coefficient: weight of the load-balancing loss.
        capacity: ``slot``: every slot has rows of its own, as in SYMI. ``rank``: the slots of a rank share its rows, as
            many as they had together.
        spare_rounds: with ``rank``, rounds in which the split of a class's tokens over its replicas is scaled towards
            the ranks that have room to spare; 0 for an even split.
        headroom: with ``rank``, rows that a rank can send to another one as a multiple of an even share: what the
            exchange of tokens costs over that of ``slot``.
    """

    num_classes: int = 8
    slots_per_rank: int = 4
    top_k: int = 1
    capacity_factor: float | None = 1.0
    aux_loss_coefficient: float = 1e-5
    capacity: Literal["slot", "rank"] = "slot"
    spare_rounds: int = 8
    headroom: float = 1.25

    def __post_init__(self) -> None:
        for name in ("num_classes", "slots_per_rank", "top_k"):
            check_count(f"ExpertConfig.{name}", getattr(self, name), least=1)
        if self.top_k > self.num_classes:
            allowed = f"a token cannot go to more than ExpertConfig.num_classes = {self.num_classes} classes"
            raise SettingError("ExpertConfig.top_k", self.top_k, allowed)
        if self.capacity_factor is not None:
            check_number("ExpertConfig.capacity_factor", self.capacity_factor, above=0)
        check_number("ExpertConfig.aux_loss_coefficient", self.aux_loss_coefficient, least=0)
        if self.capacity not in ("slot", "rank"):
            raise SettingError("ExpertConfig.capacity", self.capacity, "choose one of slot, rank")
        check_count("ExpertConfig.spare_rounds", self.spare_rounds, least=0)
        check_number("ExpertConfig.headroom", self.headroom, least=1)

    def rows_per_slot(self, local_tokens: int, num_ranks: int) -> int:
        """Rows C that one source rank may send to one slot for a micro-batch of ``local_tokens`` tokens a rank."""
        if self.capacity_factor is None:
            return local_tokens
        return math.ceil(self._capacity_of(local_tokens) / (self.slots_per_rank * num_ranks))

    def rows_per_rank(self, local_tokens: int, num_ranks: int) -> int:
        """Rows R that the slots of a rank share, for a micro-batch of ``local_tokens`` tokens a rank."""
        if self.capacity_factor is None:
            return num_ranks * local_tokens * self.top_k
        return math.ceil(self._capacity_of(local_tokens))

    def rows_per_buffer(self, local_tokens: int, num_ranks: int) -> int:
        """Rows Q that one source rank may send to one rank for a micro-batch of ``local_tokens`` tokens a rank."""
        if self.capacity_factor is None:
            return local_tokens * self.top_k
        even = Fraction(self.rows_per_rank(local_tokens, num_ranks), num_ranks)
        return max(math.ceil(even), math.floor(even * Fraction(str(self.headroom))))

    def rows_sent(self, local_tokens: int, num_ranks: int) -> int:
        """Rows of the buffers that one source rank sends to all ranks, itself among them, for a micro-batch."""
        if self.capacity == "rank":
            return num_ranks * self.rows_per_buffer(local_tokens, num_ranks)
        return num_ranks * self.slots_per_rank * self.rows_per_slot(local_tokens, num_ranks)

    def _capacity_of(self, local_tokens: int) -> Fraction:
        # Exactly: in floating point 1.1 * 100 / 10 is a little over 11, and its ceiling 12.
        return Fraction(str(self.capacity_factor)) * local_tokens * self.top_k
