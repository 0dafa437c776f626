"""Which checkpoints a run makes."""

from dataclasses import dataclass
from typing import Literal

from swift.errors import SettingError, check_count, check_number

SELECTIONS = ("sequential", "load_aware")


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a run is saved, and how much of it.

    The first checkpoint of a run, that of its last iteration and that of a planned stop are full, whatever K is.

    Attributes:
        every: iterations between checkpoints; the last iteration is saved too. 0 for none at all.
        num_kept: so many of the newest iterations that were saved can be restored.
        experts_per_layer: experts of every layer that a checkpoint saves, K, beside the whole dense part; ``all``:
            full checkpoints.
        selection: which experts: ``sequential`` goes round, ``load_aware`` takes those with most updates unsaved.
        plt_budget: proportion of lost tokens above which a fault doubles K (Dynamic-K), such as 0.0375; None: K stays.
    """

    every: int = 100
    num_kept: int = 2
    experts_per_layer: int | Literal["all"] = "all"
    selection: Literal["sequential", "load_aware"] = "sequential"
    plt_budget: float | None = None

    def __post_init__(self) -> None:
        check_count("CheckpointConfig.every", self.every, least=0)
        check_count("CheckpointConfig.num_kept", self.num_kept, least=1)
        if self.experts_per_layer != "all":
            _check_experts_per_layer(self.experts_per_layer)
        if self.selection not in SELECTIONS:
            raise SettingError("CheckpointConfig.selection", self.selection, f"choose one of {', '.join(SELECTIONS)}")
        if self.plt_budget is not None:
            check_number("CheckpointConfig.plt_budget", self.plt_budget, above=0)
            if self.plt_budget >= 1:
                raise SettingError("CheckpointConfig.plt_budget", self.plt_budget, "must be below 1")
            if self.experts_per_layer == "all":
                allowed = "would change nothing: it needs a number as CheckpointConfig.experts_per_layer"
                raise SettingError("CheckpointConfig.plt_budget", self.plt_budget, allowed)

    def check_classes(self, num_classes: int) -> None:
        """Raises SettingError where a checkpoint would save more experts of a layer than there are."""
        if self.experts_per_layer != "all" and self.experts_per_layer > num_classes:
            allowed = f"must be at most ExpertConfig.num_classes = {num_classes}; 'all' for full checkpoints"
            raise SettingError("CheckpointConfig.experts_per_layer", self.experts_per_layer, allowed)

    def first_k(self, num_classes: int) -> int:
        """K at the beginning of a run."""
        return num_classes if self.experts_per_layer == "all" else self.experts_per_layer


def _check_experts_per_layer(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        allowed = "must be a whole number of at least 1, or 'all'"
        raise SettingError("CheckpointConfig.experts_per_layer", value, allowed)
