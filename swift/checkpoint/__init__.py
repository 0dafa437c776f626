"""Checkpoints: what is saved of a run, which experts of it, and how it is checked when it is read back."""

from swift.checkpoint.arrays import load_arrays, load_metadata, save_arrays
from swift.checkpoint.buddies import BuddyCopies
from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.directory import checkpoint_path, checkpoint_steps, set_aside_newer, settle
from swift.checkpoint.lost_ranks import RankCopy, Recovered, recover_ranks
from swift.checkpoint.manifest import Copy, Ledger, Manifest, read_manifest
from swift.checkpoint.plt import Tally, dynamic_k
from swift.checkpoint.restoring import Plan, load_plan, plan_restore, record_restore
from swift.checkpoint.saving import RETRY_PAUSES_S, save_checkpoint
from swift.checkpoint.selection import partial_bytes
from swift.checkpoint.snapshots import begin_snapshot
from swift.checkpoint.split import Snapshot, Split
from swift.checkpoint.wording import restore_facts, restore_lines, save_facts, source_lines

__all__ = [
    "RETRY_PAUSES_S",
    "BuddyCopies",
    "CheckpointConfig",
    "Copy",
    "Ledger",
    "Manifest",
    "Plan",
    "RankCopy",
    "Recovered",
    "Snapshot",
    "Split",
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
