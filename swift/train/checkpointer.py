"""Checkpoints of a run, written in the background, and snapshots of its ranks in the memory of others.

``Checkpointer`` saves one state at a time. It is copied to the host, by ``begin_pieces`` or, on several hosts whose
workers hold other blocks than the stages of a checkpoint, by ``begin_block_pieces``; a thread then writes it, and
repeats ``Attempts`` that fail after pauses. On several hosts ``HostStates`` agree on a save, and each writes its part.

Orbax would wait there until all hosts save the same, even to compare the path. So the first host has small arrays
written by a process of its own, which is none of the hosts. What it writes are the files of a checkpoint without the
values, see ``reserve_arrays``.
"""

import errno
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.array_files import write_arrays
from swift.checkpoint.arrays import is_finite, is_model_array
from swift.checkpoint.inspection import restore_facts, save_facts
from swift.checkpoint.manifest import Ledger, Manifest, archive_newer, checkpoint_path
from swift.checkpoint.multi_host_save import HostFailed, HostSave, HostShard, InvalidState, Save
from swift.checkpoint.peer_snapshots import PeerSnapshots
from swift.checkpoint.reader import RestorePlan, record_restore
from swift.checkpoint.recovery import RankCopy
from swift.checkpoint.selection import dynamic_k
from swift.checkpoint.snapshots import assemble_snapshot, begin_pieces
from swift.checkpoint.units import Snapshot, StateSplit
from swift.checkpoint.writer import RETRY_PAUSES_S, save_checkpoint
from swift.config.experiment import Experiment
from swift.errors import RunError, first_line
from swift.pipeline.reconfigure.transfer import LocalRange, local_pieces
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.runlog.lease import writes_checkpoints
from swift.runlog.run_directory import RunDirectory, sync_record
from swift.tasks import one_thread
from swift.train.hosts import SINGLE_HOST, Hosts
from swift.train.saved_state import (
    extra_of,
    first_ledger,
    ledger_after,
    ledger_for,
    load_newest,
    save_fallback,
    split_of,
    to_store,
)

_Result = TypeVar("_Result")
_CLOSING_S = 10.0
"""Seconds that the process that writes has to end in."""


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
        hosts: Hosts = SINGLE_HOST,
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
        start_time, config = time.perf_counter(), self._experiment.checkpoint
        agreed, chosen_LK = self._host_states.agree(done, self._ledger.choose(config.selection, full=full))
        finish = _begin_or_fail(self._split, spec, state, chosen_LK)
        stall_ms = self._waited_ms + 1000 * (time.perf_counter() - start_time)
        self._begun = {"step": done, "at": start_time, "stall_ms": stall_ms}
        self._attempts.begin()
        facts: dict[str, Any] = {
            "ledger": self._ledger,
            "identity": self._experiment.identity(),
            "extra": extra_of(spec, position),
            "num_kept": config.num_kept,
        }
        if self._has_others:
            save_args = self._split, chosen_LK, finish, self._attempts, self._prepare, facts
            self._saving = self._thread.submit(self._host_states.save, agreed, *save_args)
            return
        join = partial(_joined, self._split, finish, chosen_LK, self._room)
        self._write = partial(save_checkpoint, step=done, split=self._split, **facts)
        self._saving = self._thread.submit(self._save, join, self._write)

    def _save(self, join: Callable[[], Snapshot], write: Callable[..., Manifest]) -> Manifest:
        self._room = None  # its buffers are overwritten, and must not pass for those of this iteration
        snapshot = join()
        dense = (array for name, array in snapshot.dense.items() if is_model_array(name))
        if not all(map(is_finite, (*dense, *snapshot.blocks.values()))):
            raise InvalidState("its values are not finite")
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
        step, start_time = self._begun["step"], time.perf_counter()
        if wait:
            self._attempts.retry_now()
        has_ended = wait or self._saving.done()
        error = self._saving.exception() if has_ended else None
        self._waited_ms = 1000 * (time.perf_counter() - start_time)
        failures = self._attempts.reported()
        if error is not None:
            failures.append(_line_of(error))
        saving = self._saving
        if has_ended:  # noted first: the disk may not take the events either
            self._saving, self.is_spoilt = None, isinstance(error, InvalidState)
            self._unsaved = None if error is None or self.is_spoilt else step
        for reason in failures:
            self._directory.log_event("checkpoint_failed", step, error=reason)
        if has_ended and error is None:
            self._note_saved(step, saving.result())
        return [f"the checkpoint of iteration {step} was not saved: {reason}" for reason in failures]

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
            return save_fallback(directory, step, lambda place: write(place, snapshot=room))
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
        aside = archive_newer(directory, start.step)
        record_restore(directory, start.manifest, after)
        self._directory.log_event("restore", start.step, **restore_facts(start, after), archived=aside)


def _joined(
    split: StateSplit, finish: Callable[[], list[HostShard]], chosen_LK: np.ndarray, room: Snapshot | None
) -> Snapshot:
    return assemble_snapshot(split, finish(), chosen_LK, room)


def _begin_or_fail(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[HostShard]]:
    """Starts to copy what a checkpoint saves, see ``begin_pieces``; what goes wrong is raised by the function."""
    try:
        if jax.process_count() > 1 and not spec.chunks.matches_stages:
            return begin_block_pieces(split, spec, state, chosen_LK)
        return begin_pieces(split, *to_store(spec, state), chosen_LK)
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)


def _fail(error: Exception) -> NoReturn:
    raise error


class Attempts:
    """Attempts of a thread, whose failures another one reports."""

    def __init__(self) -> None:
        self._is_hurried = Event()
        self._failures: SimpleQueue[str] = SimpleQueue()

    def begin(self) -> None:
        """Begins anew: nobody waits for the result."""
        self._is_hurried.clear()

    def retry_now(self) -> None:
        """Has a failed attempt repeated once, immediately."""
        self._is_hurried.set()

    def run(self, act: Callable[[], _Result]) -> _Result:
        """Returns what a function does, which is tried again after pauses, see ``RETRY_PAUSES_S``.

        Raises:
            RunError: another process has the directory.
            Exception: that of the last attempt.
        """
        for pause_s in RETRY_PAUSES_S:
            try:
                return act()
            except RunError:
                raise
            except Exception as error:
                if self._is_hurried.is_set():
                    raise
                self._failures.put(f"{_line_of(error)}; trying again in {pause_s:g} s")
                self._is_hurried.wait(pause_s)
        return act()

    def reported(self) -> list[str]:
        """Takes the lines on attempts that have failed since the last time."""
        lines = []
        while True:
            try:
                lines.append(self._failures.get_nowait())
            except Empty:
                return lines


def _line_of(error: BaseException) -> str:
    """Puts an error into one line."""
    return " ".join(f"{error}".split()) or type(error).__name__


def begin_block_pieces(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[HostShard]]:
    """Starts to copy what a checkpoint saves of a state, see ``begin_pieces``; each host copies what it has.

    Args:
        split: division of a state with one row for each stage.
        spec: spec of the state.
        state: the state; may be donated after this returns.
        chosen_LK: the chosen classes of every MoE layer of the model.

    Returns:
        A function that waits for the copy and returns the pieces that this host has, for any thread.
    """
    copies = [
        (name, piece if name not in split.expert_names else _chosen(split, piece, chosen_LK))
        for name, pieces in local_pieces(replace(state, slots={}), spec, spec.checkpoint_spec).items()
        for piece in pieces
        if name not in split.expert_names or _layers(split, piece)
    ]
    return partial(_fetch, copies)


def _fetch(copies: list[tuple[str, LocalRange]]) -> list[HostShard]:
    for _, piece in copies:
        piece.values.copy_to_host_async()
    return [HostShard(name, piece.place, np.asarray(piece.values)) for name, piece in copies]


def _layers(split: StateSplit, piece: LocalRange) -> range:
    """MoE layers of the model that an experts' piece of one stage has; none where it is padding."""
    stage, stack, *_ = piece.place
    return split.layers_of_stages[stage.start][stack]


def _chosen(split: StateSplit, piece: LocalRange, chosen_LK: np.ndarray) -> LocalRange:
    """The classes of a piece that are saved, in their order."""
    if chosen_LK.shape[-1] == split.num_classes:
        return piece
    stage, stack, *_ = piece.place
    index_LK = split.by_stage(chosen_LK)[stage.start, stack]
    return LocalRange(piece.place, jnp.take_along_axis(piece.values, index_LK[None, :, None, :, None], axis=3))


class _WriterProcess:
    """A process that writes small arrays for the first host; it starts at once and ends with this one.

    Args:
        run_dir: run directory. The next run in it waits until this process has ended.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._start()

    def write(self, path: Path, arrays: Mapping[str, np.ndarray], *, progress: Callable[[], None]) -> None:
        """Writes arrays, see ``write_arrays``; another process is started if this one has ended.

        Args:
            path: directory to make.
            arrays: arrays by name.
            progress: function to call once a second.
        """
        if not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((path, dict(arrays)))
            while not self._pipe.poll(1.0):
                progress()
            error = self._pipe.recv()
        except (EOFError, OSError) as gone:
            raise OSError(errno.EIO, "the process that writes checkpoints has ended") from gone
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(_CLOSING_S)
        self._process.kill()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        start = multiprocessing.get_context("spawn").Process  # a copy of this process would have JAX's locks
        self._process = start(target=_serve, args=(theirs, self._run_dir), name="writer", daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection, run_dir: Path) -> None:
    """Writes what comes through a pipe until that is closed."""
    # Signals to a whole container come here, too, and the last iteration is to be written yet.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")  # the accelerators belong to the process that trains
    with suppress(EOFError, OSError), writes_checkpoints(run_dir):
        while True:
            pipe.send(_error_of(*pipe.recv()))
    os._exit(0)  # a regular exit would wait for threads of a failed save, which Orbax leaves behind for minutes


def _error_of(path: Path, arrays: Mapping[str, Any]) -> Exception | None:
    try:
        write_arrays(path, arrays)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error))
    except Exception as error:  # of any library: those may have no way through a pipe
        return ValueError(str(error))
    return None


class HostStates:
    """The hosts of a run, from the side of one of them, which all save at the same iterations.

    Args:
        run_dir: run directory.
        hosts: its hosts; where there is only one, it agrees with itself.
    """

    def __init__(self, run_dir: Path, hosts: Hosts):
        self._directory, self._hosts = run_dir / "checkpoints", hosts
        self._writer = _WriterProcess(run_dir) if hosts.count > 1 and hosts.is_first else None
        self.bytes_of_hosts: list[int] = []
        """Bytes of values that each host has written of the last checkpoint, on the first one."""

    def agree(self, step: int, chosen_LK: np.ndarray) -> tuple[Save, np.ndarray]:
        """The save and the experts that the first host has chosen for it, once all hosts are here."""
        local_choice = secrets.token_hex(4), chosen_LK.shape, chosen_LK.reshape(-1).tolist()
        token, shape, chosen = self._hosts.broadcast(local_choice)
        return Save(step, token), np.array(chosen, chosen_LK.dtype).reshape(shape)

    def save(
        self,
        save: Save,
        split: StateSplit,
        chosen_LK: np.ndarray,
        finish: Callable[[], list[HostShard]],
        attempts: Attempts,
        prepare: Callable[[], None],
        facts: Mapping[str, Any],
    ) -> Manifest | None:
        """Writes this host's part of a checkpoint, in any thread.

        Args:
            save: the save.
            split: division of the state.
            chosen_LK: experts that are saved.
            finish: function that waits for this host's pieces and returns them.
            attempts: attempts of the first host to make the files; the others wait for it meanwhile.
            prepare: function that the first host calls before each.
            facts: what ``HostSave.commit`` needs to know.

        Returns:
            The manifest; None on the others than the first, which say on stderr what goes wrong.

        Raises:
            Exception: the first one could not write its part, or another one has failed.
        """
        host_save = HostSave(self._directory, save, self._hosts.index, self._hosts.count, split, chosen_LK)
        try:
            pieces = _now(finish)
            if self._writer is not None:
                attempts.run(partial(_begin, host_save, prepare, self._writer))
            else:
                host_save.wait()
            return self._write(host_save, pieces, facts)
        except Exception as error:
            host_save.board.give_up(error)
            if self._hosts.is_first:
                raise
            if not isinstance(error, HostFailed | InvalidState):  # of which the first one hears
                text = f"host {self._hosts.index}: its part of the checkpoint of iteration {save.step} was not written"
                print(f"swift: {text}: {first_line(error)}", file=sys.stderr)
            return None

    def _write(
        self, host_save: HostSave, pieces: Callable[[], list[HostShard]], facts: Mapping[str, Any]
    ) -> Manifest | None:
        try:
            host_save.write(_finite(pieces()))
            if not self._hosts.is_first:
                return None
            manifest, self.bytes_of_hosts = host_save.commit(**facts)
            return manifest
        except BaseException:
            if self._hosts.is_first:
                host_save.discard()
            raise

    def close(self) -> None:
        """Ends the process that writes, if there is one."""
        if self._writer is not None:
            self._writer.close()


def _begin(save: HostSave, prepare: Callable[[], None], writer: _WriterProcess) -> None:
    prepare()
    save.begin(partial(writer.write, progress=save.board.sign))


def _now(finish: Callable[[], list[HostShard]]) -> Callable[[], list[HostShard]]:
    """Returns a function that returns or raises what another one does now: what it waits for takes up memory."""
    try:
        pieces = finish()
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)
    return lambda: pieces


def _finite(pieces: list[HostShard]) -> list[HostShard]:
    """Returns the pieces; raises Spoilt if a value of the model is not finite."""
    if not all(is_finite(piece.values) for piece in pieces if is_model_array(piece.name)):
        raise InvalidState("its values are not finite")
    return pieces
