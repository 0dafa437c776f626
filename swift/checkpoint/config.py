"""Settings of checkpoints and snapshots."""

from dataclasses import dataclass
from typing import Literal

from swift.errors import SettingError, check_choices, check_count, check_number

_EXPERTS = {"experts_per_layer": "full checkpoints", "snapshot_experts_per_layer": "whole snapshots"}


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint and snapshot settings: the intervals, and how much of the state each contains.

    A run's first and last checkpoints are full regardless of K, and so is the one saved when a run is stopped.

    Attributes:
        every: iterations between checkpoints; the last iteration is saved too. 0 to save only when a run is stopped,
            for ``--resume``.
        num_kept: number of saved iterations to keep restorable; older ones are removed.
        num_best: number of saved iterations with the lowest validation loss to keep restorable besides the newest.
        experts_per_layer: K, the number of experts in each layer that a checkpoint saves; the dense part is always
            saved completely. ``all`` for full checkpoints.
        selection: how experts are chosen: ``sequential`` takes them in turn, and ``load_aware`` takes the experts with
            the most unsaved token updates.
        plt_budget: proportion of lost tokens above which a fault doubles K (Dynamic-K), such as 0.0375; None to keep K
            fixed.
        snapshot_every: iterations between snapshots. A snapshot copies every expert rank's slices to the memory of the
            next rank, and a lost rank is recovered from it. 0 for no snapshots.
        snapshot_experts_per_layer: number of experts in each layer that a snapshot copies, chosen by ``selection``; the
            dense part is always copied completely. ``all`` for every expert.
    """

    every: int = 100
    num_kept: int = 2
    num_best: int = 0
    experts_per_layer: int | Literal["all"] = "all"
    selection: Literal["sequential", "load_aware"] = "sequential"
    plt_budget: float | None = None
    snapshot_every: int = 0
    snapshot_experts_per_layer: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        check_count("CheckpointConfig.every", self.every, least=0)
        check_count("CheckpointConfig.num_kept", self.num_kept, least=1)
        check_count("CheckpointConfig.num_best", self.num_best, least=0)
        check_count("CheckpointConfig.snapshot_every", self.snapshot_every, least=0)
        for name in _EXPERTS:
            _check_experts_per_layer(f"CheckpointConfig.{name}", getattr(self, name))
        if self.snapshot_experts_per_layer != "all" and not self.snapshot_every:
            allowed = "would change nothing: it needs a number as CheckpointConfig.snapshot_every"
            raise SettingError("CheckpointConfig.snapshot_experts_per_layer", self.snapshot_experts_per_layer, allowed)
        check_choices(self)
        if self.plt_budget is not None:
            check_number("CheckpointConfig.plt_budget", self.plt_budget, above=0)
            if self.plt_budget >= 1:
                raise SettingError("CheckpointConfig.plt_budget", self.plt_budget, "must be below 1")
            if self.experts_per_layer == "all":
                allowed = "would change nothing: it needs a number as CheckpointConfig.experts_per_layer"
                raise SettingError("CheckpointConfig.plt_budget", self.plt_budget, allowed)

    def check_classes(self, num_classes: int) -> None:
        """Raises SettingError if a checkpoint or snapshot would save more experts of a layer than the model has."""
        for name, all_of_them in _EXPERTS.items():
            value = getattr(self, name)
            if value != "all" and value > num_classes:
                allowed = f"must be at most ExpertConfig.num_classes = {num_classes}; 'all' for {all_of_them}"
                raise SettingError(f"CheckpointConfig.{name}", value, allowed)

    def first_k(self, num_classes: int) -> int:
        """Returns K at the start of a run; Dynamic-K may raise it later."""
        return num_classes if self.experts_per_layer == "all" else self.experts_per_layer

    def snapshot_k(self, num_classes: int) -> int:
        """Returns the number of experts in each layer that a snapshot copies."""
        return num_classes if self.snapshot_experts_per_layer == "all" else self.snapshot_experts_per_layer


def _check_experts_per_layer(setting: str, value: object) -> None:
    if value != "all" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise SettingError(setting, value, "must be a whole number of at least 1, or 'all'")
