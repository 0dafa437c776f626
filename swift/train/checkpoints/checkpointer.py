"""Checkpoints of a run, written in the background, and snapshots of its ranks in the memory of others."""

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from swift.checkpoint.hosts.host_board import Spoilt
from swift.checkpoint.hosts.shared_files import Piece
from swift.checkpoint.memory.peer_snapshots import PeerSnapshots
from swift.checkpoint.memory.slice_search import RankCopy
from swift.checkpoint.memory.snapshots import join_pieces
from swift.checkpoint.partial.expert_units import Snapshot, StateSplit
from swift.checkpoint.partial.lost_tokens import dynamic_k
from swift.checkpoint.storage.directory import checkpoint_path, set_aside_newer
from swift.checkpoint.storage.manifest import Ledger, Manifest
from swift.checkpoint.storage.message_texts import restore_facts, save_facts
from swift.checkpoint.storage.reader import RestorePlan, record_restore
from swift.checkpoint.storage.verification import is_finite, is_of_model
from swift.checkpoint.storage.writer import save_checkpoint
from swift.errors import RunError
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState
from swift.runlog.run_directory import RunDirectory, sync_record
from swift.tasks import one_thread
from swift.train.checkpoints.attempts import Attempts, line_of
from swift.train.checkpoints.host_states import HostStates, begin_or_fail
from swift.train.checkpoints.rescue import keep_elsewhere
from swift.train.checkpoints.saved_state import (
    extra_of,
    first_ledger,
    ledger_after,
    ledger_for,
    load_newest,
    split_of,
)
from swift.train.hosts.agreement import ALONE, Hosts
from swift.train.settings.experiment import Experiment


class Checkpointer:
    """Saves one checkpoint and one snapshot at a time, while training continues. A context manager.

    A checkpoint that cannot be written is tried again after pauses, see ``Attempts``, without the devices: its
    state is on the host by then.

    Args:
        experiment: settings of the run.
        spec: spec of its step, on any mesh.
        directory: run directory.
        start: checkpoint from which the run continues; None for a new run.
        hosts: hosts that the run is on. Each has some pieces of a state and writes them; what the others than the first
            keep of the ledger is of no use.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: StepSpec,
        directory: RunDirectory,
        start: RestorePlan | None,
        hosts: Hosts = ALONE,
    ):
        self._experiment, self._directory, self._split = experiment, directory, split_of(spec)
        self._ledger = first_ledger(experiment, self._split)
        self._thread = one_thread("checkpoint")
        self._begun: dict[str, Any] = {}
        self._room: Snapshot | None = None
        self._waited_ms = 0.0
        self._host_states, self._has_others = HostStates(directory.path, hosts), hosts.count > 1
        self._saving: Future[Manifest | None] | None = None
        self._write: Callable[..., Manifest] | None = None
        self._unsaved: int | None = None
        self.is_spoilt = False  # the last state; another attempt to save it is of no use
        self._attempts = Attempts()
        self.newest = None if start is None else start.step
        self._peer_snapshots = PeerSnapshots(self._split, experiment.checkpoint)
        if start is not None:
            after = ledger_after(experiment, start)
            if hosts.is_first:
                self._continue_from(start, after)
            self._ledger = ledger_for(spec, start.manifest, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(OSError, RunError):
            self.follow(wait=True)
        self._thread.shutdown()
        self._host_states.close()
        self._peer_snapshots.close()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is in progress; ``follow`` notes its end."""
        return self._saving is not None

    @property
    def ledger(self) -> Ledger:
        """Ledger of the iterations counted so far."""
        return self._ledger

    def count(self, record: Mapping[str, Any]) -> None:
        """Counts an iteration, by its record in ``metrics.jsonl``."""
        self._ledger = self._ledger.counted(record["popularity"], record["dropped"])

    def save(self, spec: StepSpec, state: TrainState, position: Mapping[str, Any], done: int, *, full: bool) -> None:
        """Begins a checkpoint, on all hosts; none may be in progress, see ``follow``.

        Args:
            spec: spec of the state.
            state: state after ``done`` iterations; it may be given away when this returns.
            position: position of the loader.
            done: iterations done.
            full: whether to save all experts, whatever K is.
        """
        assert self._saving is None, "two saves at a time"
        begun, config = time.perf_counter(), self._experiment.checkpoint
        agreed, chosen_LK = self._host_states.agree(done, self._ledger.choose(config.selection, full=full))
        finish = begin_or_fail(self._split, spec, state, chosen_LK)
        stall_ms = self._waited_ms + 1000 * (time.perf_counter() - begun)
        self._begun = {"step": done, "at": begun, "stall_ms": stall_ms}
        self._attempts.begin()
        facts: dict[str, Any] = {
            "ledger": self._ledger,
            "identity": self._experiment.identity(),
            "extra": extra_of(spec, position),
            "num_kept": config.num_kept,
        }
        if self._has_others:
            how = self._split, chosen_LK, finish, self._attempts, self._prepare, facts
            self._saving = self._thread.submit(self._host_states.save, agreed, *how)
            return
        join = partial(_joined, self._split, finish, chosen_LK, self._room)
        self._write = partial(save_checkpoint, step=done, split=self._split, **facts)
        self._saving = self._thread.submit(self._save, join, self._write)

    def _save(self, join: Callable[[], Snapshot], write: Callable[..., Manifest]) -> Manifest:
        self._room = None  # its buffers are overwritten, and must not pass for those of this iteration
        snapshot = join()
        dense = (array for name, array in snapshot.dense.items() if is_of_model(name))
        if not all(map(is_finite, (*dense, *snapshot.blocks.values()))):
            raise Spoilt("its values are not finite")
        self._room = snapshot
        return self._attempts.run(partial(self._write_here, write, snapshot))

    def _prepare(self) -> None:
        self._directory.check()  # a process that has taken the directory meanwhile saves there, too
        sync_record(self._directory.path)  # what the ledger counts must not be lost while the checkpoint stays

    def _write_here(self, write: Callable[..., Manifest], snapshot: Snapshot) -> Manifest:
        self._prepare()
        return write(self._directory.checkpoints_path, snapshot=snapshot)

    def wait(self, seconds: float) -> None:
        """Waits at most this many seconds for the end of the checkpoint in progress."""
        wait([] if self._saving is None else [self._saving], seconds)

    def follow(self, *, wait: bool) -> list[str]:
        """Notes the progress of the present checkpoint.

        Args:
            wait: whether to wait for its end; a failed attempt is then repeated once, immediately.

        Returns:
            Lines on failures.
        """
        self._waited_ms = 0.0
        if self._saving is None:
            return []
        step, begun = self._begun["step"], time.perf_counter()
        if wait:
            self._attempts.hurry()
        has_ended = wait or self._saving.done()
        error = self._saving.exception() if has_ended else None
        self._waited_ms = 1000 * (time.perf_counter() - begun)
        failures = self._attempts.reported()
        if error is not None:
            failures.append(line_of(error))
        saving = self._saving
        if has_ended:  # noted first: the disk may not take the events either
            self._saving, self.is_spoilt = None, isinstance(error, Spoilt)
            self._unsaved = None if error is None or self.is_spoilt else step
        for why in failures:
            self._directory.log_event("checkpoint_failed", step, error=why)
        if has_ended and error is None:
            self._note_saved(step, saving.result())
        return [f"the checkpoint of iteration {step} was not saved: {why}" for why in failures]

    def keep_unsaved(self) -> str | None:
        """Keeps elsewhere the last state if it could not be saved.

        Returns:
            A line on its place; None if nothing is unsaved.
        """
        if self._unsaved is None:
            return None
        step, room, write = self._unsaved, self._room, self._write
        self._unsaved = None  # reported once
        if room is None or write is None:
            return f"nothing of the state after iteration {step} could be kept"
        try:
            directory = self._directory.checkpoints_path
            return keep_elsewhere(directory, step, lambda place: write(place, snapshot=room))
        except RunError as error:
            return f"the state after iteration {step} could not be kept elsewhere either: {error}"

    def _note_saved(self, step: int, manifest: Manifest | None) -> None:
        if manifest is None:  # the first host knows
            return
        self.newest = step
        self._ledger = replace(manifest.ledger, tally=self._ledger.tally)  # which has continued to count
        self._directory.log_event(
            "checkpoint",
            step,
            path=checkpoint_path(self._directory.checkpoints_path, step).name,
            stall_ms=self._begun["stall_ms"],
            save_ms=1000 * (time.perf_counter() - self._begun["at"]),
            **save_facts(manifest),
            **({"bytes_of_hosts": self._host_states.bytes_of_hosts} if self._has_others else {}),
        )

    def snapshot(self, spec: StepSpec, state: TrainState, done: int) -> None:
        """Begins a snapshot if one is due, or if there is none; see ``save``."""
        every = self._experiment.checkpoint.snapshot_every
        if every and spec.live.num_ranks > 1 and (self._peer_snapshots.is_empty or done % every == 0):
            updates_LE = self._ledger.tally.contained_LE
            trouble = self._peer_snapshots.begin(replace(state, slots={}), spec.live, done, updates_LE)
            if trouble is not None:
                self._directory.log_event("snapshot_failed", done, error=trouble)

    def copies(self, ranks: Collection[int]) -> list[RankCopy]:
        """Returns the snapshots of some ranks."""
        return self._peer_snapshots.copies(ranks)

    def load(self, spec: StepSpec) -> tuple[TrainState, RestorePlan] | None:
        """Loads the newest intact checkpoint, see ``load_newest``."""
        return load_newest(self._directory.checkpoints_path, self._experiment.identity(), spec)

    def change_ranks(self, spec: StepSpec, ledger: Ledger) -> None:
        """Continues with a state on other ranks, of which no copy exists yet, in memory or on disk.

        Args:
            spec: spec of the state.
            ledger: ledger with the losses.
        """
        assert self._saving is None, "what is being saved is of other ranks"
        config, has_lost = self._experiment.checkpoint, ledger.tally.num_lost > self._ledger.tally.num_lost
        k = dynamic_k(ledger.k, ledger.tally.plt, config.plt_budget, ledger.num_classes) if has_lost else ledger.k
        self._split, self._room, self._ledger = split_of(spec), None, ledger.emptied(k)
        self._peer_snapshots.close()
        self._peer_snapshots = PeerSnapshots(self._split, config)

    def _continue_from(self, start: RestorePlan, after: Ledger) -> None:
        """Makes the checkpoint from which the run continues its newest one, and records the loss."""
        directory = self._directory.checkpoints_path
        aside = set_aside_newer(directory, start.step)
        record_restore(directory, start.manifest, after)
        self._directory.log_event("restore", start.step, **restore_facts(start, after), set_aside=aside)


def _joined(
    split: StateSplit, finish: Callable[[], list[Piece]], chosen_LK: np.ndarray, room: Snapshot | None
) -> Snapshot:
    return join_pieces(split, finish(), chosen_LK, room)
