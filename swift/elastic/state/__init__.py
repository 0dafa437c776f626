"""State that outlives a process.

``store`` keeps states in shared memory, with a disk for what does not fit. ``slices`` has the copies of ranks' slices
at their neighbours, and what is handed over when the ranks of a run change; from these, ``swift.elastic.services``
recovers the slices of lost ranks. ``run_files`` makes the directories that the processes of a run share, and
``ledger_counts`` counts token updates for the ledgers of checkpoints.
"""
