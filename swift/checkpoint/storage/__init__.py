"""Checkpoints on disk.

``orbax_files`` writes arrays to files, ``manifest`` locates the newest copy of everything, ``writer`` and ``reader``
save and restore a run, and ``verification`` checks files against their digests. ``arrays`` stores any other tree of
arrays, such as an exported model.
"""
