"""The lock of a run directory: one process writes to it at a time, on whichever machine.

``lease`` judges whether an owner lives, ``lease_files`` and ``owners`` gather the evidence, and ``run_lock`` takes the
directory and renews the lease.
"""

from swift.runlog.lock.lease import BEAT_S, SILENCE_S, WATCH_S, Owner, ProcessTable, Verdict, Watch, judge
from swift.runlog.lock.owners import process_is_there, this_process
from swift.runlog.lock.run_lock import Lease, acquire_lease, last_beat, living_owner, remove_lease, writes_checkpoints

__all__ = [
    "BEAT_S",
    "SILENCE_S",
    "WATCH_S",
    "Lease",
    "Owner",
    "ProcessTable",
    "Verdict",
    "Watch",
    "acquire_lease",
    "judge",
    "last_beat",
    "living_owner",
    "process_is_there",
    "remove_lease",
    "this_process",
    "writes_checkpoints",
]
