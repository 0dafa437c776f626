"""Checkpoints in the memory of other ranks.

``snapshots`` copies a state from the devices to the host, ``peer_snapshots`` keeps each rank's copy with its neighbour,
and ``rank_recovery`` recovers a lost rank's slices from snapshots, replicas or storage. In a run of several processes
the copies are files, see ``swift.elastic.state``, and ``swift.elastic.services`` calls the recovery.
"""
