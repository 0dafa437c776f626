"""Checkpoints of a training run, whole and partial (MoC-System), and snapshots in memory.

``units`` divides a state into a dense part and experts, and ``selection`` chooses the experts that a partial checkpoint
saves and counts the tokens that this loses; ``config`` has the settings. ``manifest`` has what is known of a
checkpoint, and the directory of all of them; ``array_files`` writes arrays, and ``arrays`` verifies them.

``writer`` saves a checkpoint, ``multi_host_save`` has several hosts write one together, ``reader`` chooses the copies
to restore, and ``inspection`` describes all that for people. ``snapshots`` copies a state from devices, and
``peer_snapshots`` keeps snapshots of each rank in the memory of another, from which ``recovery`` fills in the slices of
lost ranks.
"""
