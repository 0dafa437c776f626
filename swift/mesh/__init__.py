"""Live meshes: how code written for one rank runs on all of them."""

from swift.mesh.emulate import EmulationError, emulate_devices
from swift.mesh.live import EXPERT_AXIS, RANK_KINDS, RANKED, SHARED, WORKER_AXIS, LiveMesh, RankKind, live_mesh
from swift.mesh.traffic import collective_bytes

__all__ = [
    "EXPERT_AXIS",
    "RANKED",
    "RANK_KINDS",
    "SHARED",
    "WORKER_AXIS",
    "EmulationError",
    "LiveMesh",
    "RankKind",
    "collective_bytes",
    "emulate_devices",
    "live_mesh",
]
