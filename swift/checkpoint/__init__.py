"""Checkpoints: what is saved of a run, which experts of it, and how it is checked when it is read back."""

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.memory.peer_snapshots import PeerSnapshots
from swift.checkpoint.memory.rank_recovery import RankCopy, Recovered, recover_ranks
from swift.checkpoint.memory.snapshots import begin_snapshot
from swift.checkpoint.partial.expert_units import Snapshot, StateSplit
from swift.checkpoint.partial.lost_tokens import Tally, dynamic_k
from swift.checkpoint.partial.selection import partial_bytes
from swift.checkpoint.storage.arrays import load_arrays, load_metadata, save_arrays
from swift.checkpoint.storage.directory import checkpoint_path, checkpoint_steps, set_aside_newer, settle
from swift.checkpoint.storage.manifest import Copy, Ledger, Manifest, read_manifest
from swift.checkpoint.storage.message_texts import restore_facts, restore_lines, save_facts, source_lines
from swift.checkpoint.storage.reader import RestorePlan, load_plan, plan_restore, record_restore
from swift.checkpoint.storage.writer import RETRY_PAUSES_S, save_checkpoint

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
]
