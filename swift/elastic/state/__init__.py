"""State that outlives a process.

States in shared memory, with a disk for what does not fit; copies of slices at neighbours; states handed over when the
ranks of a run change; and the files that its processes share. From these, ``swift.elastic.services`` recovers the
slices of lost ranks with ``swift.checkpoint.recovery.recover_ranks``.
"""
