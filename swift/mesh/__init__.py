"""Live meshes: how code written for one rank runs on all of them."""

from swift.mesh.emulate import EmulationError, emulate_devices
from swift.mesh.hlo_collectives import Collective, collective_bytes, collectives
from swift.mesh.live import (
    AXES,
    EXPERT_AXIS,
    RANK_KINDS,
    RANKED,
    REPLICATED,
    SHARED,
    WORKER_AXIS,
    LiveMesh,
    MeshRow,
    RankKind,
    live_mesh,
    own_row,
    storage_mesh,
)
from swift.mesh.peer_reduce import PeerSum, how_unequal
from swift.mesh.state_transfer import host_stages, move_rows, moved_bytes, source_rows

__all__ = [
    "AXES",
    "EXPERT_AXIS",
    "RANKED",
    "RANK_KINDS",
    "REPLICATED",
    "SHARED",
    "WORKER_AXIS",
    "Collective",
    "EmulationError",
    "LiveMesh",
    "MeshRow",
    "PeerSum",
    "RankKind",
    "collective_bytes",
    "collectives",
    "emulate_devices",
    "host_stages",
    "how_unequal",
    "live_mesh",
    "move_rows",
    "moved_bytes",
    "own_row",
    "source_rows",
    "storage_mesh",
]
