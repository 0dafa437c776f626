"""Checkpoints of a training run, full and partial (MoC-System), and snapshots in memory.

- Content: ``units`` divides a state into a dense part and experts. ``selection`` chooses the experts of a partial
  checkpoint and counts the token updates that a restore loses. ``config`` defines the settings.
- Storage: ``manifest`` describes a checkpoint and the directory of all checkpoints. ``array_files`` reads and writes
  arrays, and ``arrays`` verifies them. ``writer`` saves on a single host, and ``multi_host_save`` on several hosts
  together. ``saver`` decides when a state is written. ``reader`` chooses and reads the copies to restore, and
  ``inspection`` describes checkpoints and restores for users.
- Memory: ``snapshots`` copies a state from the devices, and ``peer_snapshots`` keeps each rank's snapshots in the
  memory of another rank. ``recovery`` rebuilds the slices of lost ranks from snapshots, replicas and checkpoints.
"""
