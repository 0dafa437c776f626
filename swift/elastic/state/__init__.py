"""State that outlives a process.

In shared memory, as copies at neighbours, handed over when ranks change; and the files that the processes of a run
share.
"""

from swift.elastic.state.copies import Copies, copy_shapes
from swift.elastic.state.handover import Handover
from swift.elastic.state.ledger_counts import LedgerCounts
from swift.elastic.state.neighbour_copies import NeighbourCopies, compiled_neighbour, neighbour_key
from swift.elastic.state.run_files import RunFiles, own_memory, remove_left_behind
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.state.state_shards import cut_parts, join_parts

__all__ = [
    "Copies",
    "Handover",
    "LedgerCounts",
    "NeighbourCopies",
    "RunFiles",
    "SharedMemoryStore",
    "compiled_neighbour",
    "copy_shapes",
    "cut_parts",
    "join_parts",
    "neighbour_key",
    "own_memory",
    "remove_left_behind",
]
