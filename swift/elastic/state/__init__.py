"""State that outlives a process: training states in shared memory, and the files that processes of a run share.

``store`` stores states in shared memory, or on a disk if that is full. ``slices`` copies each rank's slices to a
neighbour, and shares states when the ranks of a run change; ``swift.elastic.services`` uses both to recover the slices
of lost ranks. ``run_files`` creates the directories that the processes of a run share, and ``ledger_counts`` counts
token updates for the ledgers of checkpoints.
"""
