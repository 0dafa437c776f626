"""What an expert layer is made of, as settings."""

import math
from dataclasses import dataclass
from fractions import Fraction

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
    """

    num_classes: int = 8
    slots_per_rank: int = 4
    top_k: int = 1
    capacity_factor: float | None = 1.0
    aux_loss_coefficient: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("num_classes", "slots_per_rank", "top_k"):
            check_count(f"ExpertConfig.{name}", getattr(self, name), least=1)
        if self.top_k > self.num_classes:
            allowed = f"a token cannot go to more than ExpertConfig.num_classes = {self.num_classes} classes"
            raise SettingError("ExpertConfig.top_k", self.top_k, allowed)
        if self.capacity_factor is not None:
            check_number("ExpertConfig.capacity_factor", self.capacity_factor, above=0)
        check_number("ExpertConfig.aux_loss_coefficient", self.aux_loss_coefficient, least=0)

    def rows_per_slot(self, local_tokens: int, num_ranks: int) -> int:
        """Rows C that one source rank may send to one slot for a micro-batch of ``local_tokens`` tokens a rank."""
        if self.capacity_factor is None:
            return local_tokens
        # Exactly: in floating point 1.1 * 100 / 10 is a little over 11, and its ceiling 12.
        share = Fraction(str(self.capacity_factor)) * local_tokens * self.top_k / (self.slots_per_rank * num_ranks)
        return math.ceil(share)
