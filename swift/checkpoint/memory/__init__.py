"""Checkpoints in the memory of other ranks.

``snapshots`` copies a state from the devices to the host, ``peer_snapshots`` keeps each rank's copy with its neighbour,
and ``rank_recovery`` recovers a lost rank's slices from snapshots, replicas or storage. In a run of several processes
the copies are files, see ``swift.elastic.state``, and ``swift.elastic.services`` calls the recovery.
"""

from swift.checkpoint.memory.peer_snapshots import PeerSnapshots
from swift.checkpoint.memory.rank_recovery import Recovered, recover_ranks
from swift.checkpoint.memory.slice_search import RankCopy
from swift.checkpoint.memory.snapshots import begin_pieces, begin_snapshot, join_pieces

__all__ = [
    "PeerSnapshots",
    "RankCopy",
    "Recovered",
    "begin_pieces",
    "begin_snapshot",
    "join_pieces",
    "recover_ranks",
]
