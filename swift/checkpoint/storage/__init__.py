"""Checkpoints on disk.

``orbax_files`` writes arrays to files, ``manifest`` locates the newest copy of everything, ``writer`` and ``reader``
save and restore a run, and ``verification`` checks files against their digests. ``arrays`` stores any other tree of
arrays, such as an exported model.
"""

from swift.checkpoint.storage.arrays import load_arrays, load_metadata, save_arrays, stored_types
from swift.checkpoint.storage.digests import (
    BLOCK,
    array_checksum,
    array_digest,
    digest,
    raw_bytes,
    synced_digest,
    synced_digests,
)
from swift.checkpoint.storage.directory import (
    ARRAYS,
    begin_save,
    checkpoint_path,
    checkpoint_steps,
    clean_up_saves,
    commit_save,
    committed_steps,
    set_aside_newer,
    temporary_path,
)
from swift.checkpoint.storage.inspection import coverage, damages, find_checkpoints, overview, what_a_restore_does
from swift.checkpoint.storage.manifest import (
    MANIFEST,
    Copy,
    Files,
    Ledger,
    Manifest,
    read_manifest,
    read_signed,
    write_signed,
)
from swift.checkpoint.storage.message_texts import restore_facts, restore_lines, save_facts, source_lines
from swift.checkpoint.storage.orbax_files import (
    data_file,
    files_of,
    map_array,
    reserve_arrays,
    runs,
    write_arrays,
    writing_parts,
)
from swift.checkpoint.storage.reader import RestorePlan, load_plan, load_share, plan_restore, record_restore
from swift.checkpoint.storage.verification import Checker, equal_part, is_finite, is_of_model, is_stored, unit_array
from swift.checkpoint.storage.writer import RETRY_PAUSES_S, WrittenArrays, finish_save, save_checkpoint

__all__ = [
    "ARRAYS",
    "BLOCK",
    "MANIFEST",
    "RETRY_PAUSES_S",
    "Checker",
    "Copy",
    "Files",
    "Ledger",
    "Manifest",
    "RestorePlan",
    "WrittenArrays",
    "array_checksum",
    "array_digest",
    "begin_save",
    "checkpoint_path",
    "checkpoint_steps",
    "clean_up_saves",
    "commit_save",
    "committed_steps",
    "coverage",
    "damages",
    "data_file",
    "digest",
    "equal_part",
    "files_of",
    "find_checkpoints",
    "finish_save",
    "is_finite",
    "is_of_model",
    "is_stored",
    "load_arrays",
    "load_metadata",
    "load_plan",
    "load_share",
    "map_array",
    "overview",
    "plan_restore",
    "raw_bytes",
    "read_manifest",
    "read_signed",
    "record_restore",
    "reserve_arrays",
    "restore_facts",
    "restore_lines",
    "runs",
    "save_arrays",
    "save_checkpoint",
    "save_facts",
    "set_aside_newer",
    "source_lines",
    "stored_types",
    "synced_digest",
    "synced_digests",
    "temporary_path",
    "unit_array",
    "what_a_restore_does",
    "write_arrays",
    "write_signed",
    "writing_parts",
]
