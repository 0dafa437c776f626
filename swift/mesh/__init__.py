"""Live meshes: run code written for one rank on all ranks, and move state between meshes.

``live`` lays the live workers on devices, ``host_order`` those of several hosts, and ``per_rank`` runs code of one rank
on all; ``peer_reduce`` sums over the peers of a stage; ``state_transfer`` and ``process_shards`` move state between
meshes and between processes, and ``process_group`` says at which addresses processes of several machines meet.
"""

from swift.mesh.chips import CHIPS, Chip, host_matmul_flops, peak_flops
from swift.mesh.emulate import EmulationError, emulate_devices
from swift.mesh.hlo_collectives import ALL_TO_ALL, RAGGED, Collective, collective_bytes, collectives
from swift.mesh.host_order import host_line, order_by_host
from swift.mesh.live import LiveMesh, MeshRow, RankKind, live_mesh, own_row, own_rows, storage_mesh
from swift.mesh.peer_reduce import PeerSum, Unequal, how_unequal
from swift.mesh.per_rank import (
    AXES,
    EXPERT_AXIS,
    RANKED,
    REPLICATED,
    SHARED,
    WORKER_AXIS,
    is_spec,
    known_platform,
    map_specs,
)
from swift.mesh.process_group import LOOPBACK, bound_address, find_group, jax_internals, own_address, use_gloo_at
from swift.mesh.process_shards import Shards, copy_bits, fetch_shards, place_shards, shard_shapes
from swift.mesh.program_cache import keep_programs
from swift.mesh.program_memory import ProgramMemory
from swift.mesh.state_transfer import host_stages, move_rows, moved_bytes, source_rows

__all__ = [
    "ALL_TO_ALL",
    "AXES",
    "CHIPS",
    "EXPERT_AXIS",
    "LOOPBACK",
    "RAGGED",
    "RANKED",
    "REPLICATED",
    "SHARED",
    "WORKER_AXIS",
    "Chip",
    "Collective",
    "EmulationError",
    "LiveMesh",
    "MeshRow",
    "PeerSum",
    "ProgramMemory",
    "RankKind",
    "Shards",
    "Unequal",
    "bound_address",
    "collective_bytes",
    "collectives",
    "copy_bits",
    "emulate_devices",
    "fetch_shards",
    "find_group",
    "host_line",
    "host_matmul_flops",
    "host_stages",
    "how_unequal",
    "is_spec",
    "jax_internals",
    "keep_programs",
    "known_platform",
    "live_mesh",
    "map_specs",
    "move_rows",
    "moved_bytes",
    "order_by_host",
    "own_address",
    "own_row",
    "own_rows",
    "peak_flops",
    "place_shards",
    "shard_shapes",
    "source_rows",
    "storage_mesh",
    "use_gloo_at",
]
