"""Checkpoints on disk.

``orbax_files`` writes arrays to files, ``manifest`` locates the newest copy of everything, ``writer`` and ``reader``
save and restore a run, and ``verification`` checks files against their digests. ``arrays`` stores any other tree of
arrays, such as an exported model, and ``host_pieces`` brings together what several hosts have of a state.
"""

from swift.checkpoint.storage.arrays import load_arrays, load_metadata, save_arrays, stored_types
from swift.checkpoint.storage.digests import array_checksum, digest, raw_bytes, synced_digests
from swift.checkpoint.storage.directory import (
    begin_save,
    checkpoint_path,
    checkpoint_steps,
    clean_up_saves,
    commit_save,
    set_aside_newer,
)
from swift.checkpoint.storage.host_pieces import Piece, Save, give_up, read_pieces, write_pieces
from swift.checkpoint.storage.inspection import coverage, damages, find_checkpoints, overview, what_a_restore_does
from swift.checkpoint.storage.manifest import MANIFEST, Copy, Ledger, Manifest, read_manifest
from swift.checkpoint.storage.message_texts import restore_facts, restore_lines, save_facts, source_lines
from swift.checkpoint.storage.orbax_files import write_arrays
from swift.checkpoint.storage.reader import RestorePlan, load_plan, load_share, plan_restore, record_restore
from swift.checkpoint.storage.verification import Checker, is_finite, is_of_model
from swift.checkpoint.storage.writer import RETRY_PAUSES_S, save_checkpoint

__all__ = [
    "MANIFEST",
    "RETRY_PAUSES_S",
    "Checker",
    "Copy",
    "Ledger",
    "Manifest",
    "Piece",
    "RestorePlan",
    "Save",
    "array_checksum",
    "begin_save",
    "checkpoint_path",
    "checkpoint_steps",
    "clean_up_saves",
    "commit_save",
    "coverage",
    "damages",
    "digest",
    "find_checkpoints",
    "give_up",
    "is_finite",
    "is_of_model",
    "load_arrays",
    "load_metadata",
    "load_plan",
    "load_share",
    "overview",
    "plan_restore",
    "raw_bytes",
    "read_manifest",
    "read_pieces",
    "record_restore",
    "restore_facts",
    "restore_lines",
    "save_arrays",
    "save_checkpoint",
    "save_facts",
    "set_aside_newer",
    "source_lines",
    "stored_types",
    "synced_digests",
    "what_a_restore_does",
    "write_arrays",
    "write_pieces",
]
