"""Checkpoints of a training run, full and partial (MoC-System), and snapshots in memory.

- Content: ``units`` divides a state into a dense part and experts. ``selection`` chooses the experts of a partial
  checkpoint and counts the tokens that a restore loses. ``config`` has the settings.
- Storage: ``manifest`` describes a checkpoint and the directory of all checkpoints. ``array_files`` writes arrays, and
  ``arrays`` verifies them. ``saver`` decides when a state is written, ``writer`` saves it on one host, and
  ``multi_host_save`` on several hosts together. ``reader`` chooses the copies to restore, and ``inspection`` prints all
  this for people.
- Memory: ``snapshots`` copies a state from the devices, and ``peer_snapshots`` keeps each rank's snapshots in the
  memory of another rank. ``recovery`` rebuilds the slices of lost ranks from them.
"""
