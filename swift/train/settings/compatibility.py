"""Settings that exclude each other: snapshots and peers, state tied to its ranks and what moves it."""

from swift.checkpoint import CheckpointConfig
from swift.errors import SettingError
from swift.experts import ExpertConfig
from swift.experts.placement import PlacementPolicy, Static
from swift.mesh import RankKind
from swift.topology import Topology


def check_snapshots(checkpoint: CheckpointConfig, topology: Topology) -> None:
    """Raises SettingError if snapshots are asked for where no other rank keeps them, or peers make them needless."""
    setting, every = "CheckpointConfig.snapshot_every", checkpoint.snapshot_every
    if every and topology.num_pipelines > 1:
        raise SettingError(setting, every, "must be 0 with several pipelines, where peers have what is lost")
    if every and topology.num_expert_ranks == 1:
        raise SettingError(setting, every, "must be 0 with one expert rank: there is no other to keep its snapshot")


def check_coupled(
    experts: ExpertConfig,
    placement: PlacementPolicy,
    topology: Topology,
    ranks: RankKind,
    checkpoint: CheckpointConfig,
) -> None:
    """Raises SettingError if the state cannot be tied to its ranks and slots, the layout ``coupled``."""
    setting = "OptimizerConfig.layout"
    if len(topology.workers) > 1:
        shape = (topology.num_pipelines, topology.num_stages)
        allowed = f"runs with one pipeline of one stage only, and the topology has {shape}: use decoupled"
        raise SettingError(setting, "coupled", allowed)
    if checkpoint.experts_per_layer != "all":
        allowed = "must be 'all' with OptimizerConfig.layout = 'coupled', where no expert has a state of its own"
        raise SettingError("CheckpointConfig.experts_per_layer", checkpoint.experts_per_layer, allowed)
    if checkpoint.snapshot_every:
        allowed = "must be 0 with OptimizerConfig.layout = 'coupled', whose state is tied to its ranks"
        raise SettingError("CheckpointConfig.snapshot_every", checkpoint.snapshot_every, allowed)
    if not isinstance(placement, Static):
        return
    if ranks == "virtual":
        allowed = "with a static placement reduces over groups of ranks, which virtual ranks cannot: use decoupled"
        raise SettingError(setting, "coupled", allowed)
    classes, slots, num_ranks = experts.num_classes, experts.slots_per_rank, topology.num_expert_ranks
    if classes % slots or num_ranks % max(1, classes // slots):
        allowed = f"needs ExpertConfig.slots_per_rank = {slots} to divide ExpertConfig.num_classes = {classes}, "
        allowed += f"and the quotient to divide Topology.num_expert_ranks = {num_ranks}"
        raise SettingError(setting, "coupled", allowed)
