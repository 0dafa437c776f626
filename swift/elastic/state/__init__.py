"""State that outlives a process.

States in shared memory, with a disk for what does not fit; copies of slices at neighbours; states handed over when the
ranks of a run change; and the files that its processes share. From these, ``swift.elastic.services`` recovers the
slices of lost ranks with ``swift.checkpoint.recover_ranks``.
"""

from swift.elastic.state.directory_mender import DirectoryMender
from swift.elastic.state.handover import Handover
from swift.elastic.state.ledger_counts import LedgerCounts
from swift.elastic.state.neighbour_copies import NeighbourCopies, compiled_neighbour, neighbour_key
from swift.elastic.state.run_files import RunFiles, node_memory, remove_leftovers
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.state.slice_copies import SliceCopies, copy_shapes
from swift.elastic.state.state_shards import join_parts, process_parts

__all__ = [
    "DirectoryMender",
    "Handover",
    "LedgerCounts",
    "NeighbourCopies",
    "RunFiles",
    "SharedMemoryStore",
    "SliceCopies",
    "compiled_neighbour",
    "copy_shapes",
    "join_parts",
    "neighbour_key",
    "node_memory",
    "process_parts",
    "remove_leftovers",
]
