"""Checkpoints of a training run, whole and partial (MoC-System).

``partial`` chooses the experts that a checkpoint saves and counts the tokens that this loses, ``storage`` writes,
verifies and reads checkpoints on disk, and ``memory`` keeps snapshots of each rank in the memory of another.
"""

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.memory import PeerSnapshots, RankCopy, Recovered, begin_snapshot, recover_ranks
from swift.checkpoint.partial import Snapshot, StateSplit, Tally, dynamic_k, partial_bytes
from swift.checkpoint.storage import (
    RETRY_PAUSES_S,
    Copy,
    Ledger,
    Manifest,
    RestorePlan,
    checkpoint_path,
    checkpoint_steps,
    load_arrays,
    load_metadata,
    load_plan,
    plan_restore,
    read_manifest,
    record_restore,
    restore_facts,
    restore_lines,
    save_arrays,
    save_checkpoint,
    save_facts,
    set_aside_newer,
    settle,
    source_lines,
    stored_types,
)

__all__ = [
    "RETRY_PAUSES_S",
    "CheckpointConfig",
    "Copy",
    "Ledger",
    "Manifest",
    "PeerSnapshots",
    "RankCopy",
    "Recovered",
    "RestorePlan",
    "Snapshot",
    "StateSplit",
    "Tally",
    "begin_snapshot",
    "checkpoint_path",
    "checkpoint_steps",
    "dynamic_k",
    "load_arrays",
    "load_metadata",
    "load_plan",
    "partial_bytes",
    "plan_restore",
    "read_manifest",
    "record_restore",
    "recover_ranks",
    "restore_facts",
    "restore_lines",
    "save_arrays",
    "save_checkpoint",
    "save_facts",
    "set_aside_newer",
    "settle",
    "source_lines",
    "stored_types",
]
