"""Saves a run's checkpoints in the background, and snapshots of its ranks in each other's memory.

``Checkpointer`` saves one state at a time. ``begin_pieces`` copies the state to the host, or ``begin_block_pieces`` on
several hosts if their workers hold other blocks than the checkpoint's stages. ``SaverThread`` then writes the state,
and retries a failed write after a pause. On several hosts, ``HostStates`` makes them agree on a save, and each host
writes its part.

Within a group of JAX processes, Orbax synchronizes all hosts, even to compare paths. The first host therefore starts a
separate process outside the group, which writes the small arrays of ``reserve_arrays``: the files without values.
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
from threading import Condition
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint import saver
from swift.checkpoint.array_files import write_arrays
from swift.checkpoint.arrays import is_finite, is_model_array
from swift.checkpoint.inspection import restore_facts, save_facts
from swift.checkpoint.manifest import VALIDATION, Ledger, Manifest, archive_newer, checkpoint_path
from swift.checkpoint.multi_host_save import HostFailed, HostSave, HostShard, InvalidState, Save
from swift.checkpoint.peer_snapshots import PeerSnapshots
from swift.checkpoint.reader import RestorePlan, record_restore
from swift.checkpoint.recovery import RankCopy
from swift.checkpoint.selection import dynamic_k
from swift.checkpoint.snapshots import assemble_snapshot, begin_pieces
from swift.checkpoint.units import Snapshot, StateSplit
from swift.checkpoint.writer import save_checkpoint
from swift.config.experiment import Experiment
from swift.errors import RunError, first_line
from swift.pipeline.reconfigure.transfer import LocalRange, local_pieces
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.runlog.lease import writes_checkpoints
from swift.runlog.run_directory import RunDirectory, sync_record
from swift.tasks import one_thread
from swift.train.hosts import SINGLE_HOST, Hosts
from swift.train.records import Validations
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
"""Seconds that the writer process gets to exit before it is killed."""


class Checkpointer:
    """Saves one checkpoint and one snapshot at a time, while training continues. A context manager.

    A failed write is retried after a pause, see ``SaverThread``. Retries do not involve the devices, as the state is
    already on the host.

    Args:
        experiment: settings of the run.
        spec: spec of the run's step, on any mesh.
        directory: run directory.
        start: checkpoint from which the run continues; None for a new run.
        hosts: hosts of the run. Each host writes the pieces of the state that it holds. Only the first host's ledger is
            used.

    Attributes:
        ledger: ledger of token updates, with all iterations counted so far.
        newest: iteration of the newest checkpoint, or None if there is none.
        validations: validation losses so far, which each checkpoint records.
        is_spoilt: whether the last state could not be saved because its values were not finite.
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
        self.ledger = first_ledger(experiment, self._split)
        self._thread, self._host_states = SaverThread(), HostStates(directory, hosts)
        self._begun: dict[str, Any] = {}
        self._waited_ms = 0.0
        self._saving: Future[Manifest | None] | None = None
        self.is_spoilt = False
        self.newest = None if start is None else start.step
        self.validations = Validations.restored(
            {} if start is None else start.manifest.extra, experiment.min_improvement, experiment.tokens_per_evaluation
        )
        self._peer_snapshots = PeerSnapshots(self._split, experiment.checkpoint)
        if start is not None:
            after = ledger_after(experiment, start)
            if hosts.is_first:
                self._continue_from(start, after)
            self.ledger = ledger_for(spec, start.manifest, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # If the block failed, its own error matters more than a failed save.
        with nullcontext() if error is None else suppress(OSError, RunError):
            self.follow(wait=True)
        self._thread.close()
        self._host_states.close()
        self._peer_snapshots.close()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is in progress, or has ended but ``follow`` has not recorded that yet."""
        return self._saving is not None

    def count(self, record: Mapping[str, Any]) -> None:
        """Adds an iteration's token updates to the ledger, from its record in ``metrics.jsonl``."""
        self.ledger = self.ledger.counted(record["popularity"], record["dropped"])

    def save(self, spec: StepSpec, state: TrainState, position: Mapping[str, Any], done: int, *, full: bool) -> None:
        """Begins a checkpoint on all hosts; no other checkpoint may be in progress, see ``follow``.

        Args:
            spec: spec of the state.
            state: state after ``done`` iterations; may be donated after this returns.
            position: position of the loader.
            done: iterations done.
            full: whether to save all experts, regardless of K.
        """
        assert self._saving is None, "two saves at a time"
        start_time, config = time.perf_counter(), self._experiment.checkpoint
        agreed, chosen_LK = self._host_states.agree(done, self.ledger.choose(config.selection, full=full))
        finish = _begin_or_fail(self._split, spec, state, chosen_LK)
        stall_ms = self._waited_ms + 1000 * (time.perf_counter() - start_time)
        self._begun = {"step": done, "at": start_time, "stall_ms": stall_ms}
        facts: dict[str, Any] = {
            "ledger": self.ledger,
            "identity": self._experiment.identity(),
            "extra": extra_of(spec, position) | {VALIDATION: self.validations.to_json()},
            "num_kept": config.num_kept,
            "num_best": config.num_best,
        }
        save_args = agreed, self._split, chosen_LK, finish, self._thread.repeat, facts
        self._saving = self._thread.begin(done, partial(self._host_states.save, *save_args))

    def wait(self, seconds: float) -> None:
        """Waits for the checkpoint in progress to end, for at most this many seconds."""
        wait([] if self._saving is None else [self._saving], seconds)

    def follow(self, *, wait: bool) -> list[str]:
        """Records the progress of the current checkpoint: failed attempts and its end.

        Args:
            wait: whether to wait for the end; a failed attempt is then retried once, without a pause.

        Returns:
            A line for each failure.
        """
        self._waited_ms = 0.0
        if self._saving is None:
            return []
        step, saving, start_time = self._begun["step"], self._saving, time.perf_counter()
        if wait:
            self._thread.on(saver.Draining())
        has_ended = wait or saving.done()
        error = saving.exception() if has_ended else None
        self._waited_ms = 1000 * (time.perf_counter() - start_time)
        if has_ended:  # before logging the events, which may fail too if the disk is full
            self._saving, self.is_spoilt = None, isinstance(error, InvalidState)
        failures = self._thread.take_failures()
        for failure in failures:
            self._directory.log_event("checkpoint_failed", step, error=failure.reason)
        if has_ended and error is None:
            self._note_saved(step, saving.result())
        return [failure.line for failure in failures]

    def keep_unsaved(self) -> str | None:
        """Writes the last state to a fallback directory if it could not be saved.

        Returns:
            A line that says where the state is, or why it is lost; None if nothing was unsaved.
        """
        unsaved = self._thread.unsaved
        if unsaved is None or self.is_busy:
            return None
        self._thread.on(saver.FallbackRequested())
        text = self._host_states.keep(unsaved)
        self._thread.on(saver.Written())  # report it only once
        return text

    def _note_saved(self, step: int, manifest: Manifest | None) -> None:
        if manifest is None:  # only the first host records a save
            return
        self.newest = step
        # Training continued during the save: keep the current counts, and take the rest from the manifest.
        self.ledger = replace(manifest.ledger, tally=self.ledger.tally)
        self._directory.log_event(
            "checkpoint",
            step,
            path=checkpoint_path(self._directory.checkpoints_path, step).name,
            stall_ms=self._begun["stall_ms"],
            save_ms=1000 * (time.perf_counter() - self._begun["at"]),
            **save_facts(manifest),
            **({"bytes_of_hosts": sizes} if (sizes := self._host_states.bytes_of_hosts) else {}),
        )

    def snapshot(self, spec: StepSpec, state: TrainState, done: int) -> None:
        """Begins a snapshot if one is due or none exists yet; see ``save`` for the arguments."""
        every = self._experiment.checkpoint.snapshot_every
        if every and spec.live.num_ranks > 1 and (self._peer_snapshots.is_empty or done % every == 0):
            updates_LE = self.ledger.tally.contained_LE
            trouble = self._peer_snapshots.begin(replace(state, slots={}), spec.live, done, updates_LE)
            if trouble is not None:
                self._directory.log_event("snapshot_failed", done, error=trouble)

    def copies(self, ranks: Collection[int]) -> list[RankCopy]:
        """Returns the snapshots of the given ranks."""
        return self._peer_snapshots.copies(ranks)

    def load(self, spec: StepSpec) -> tuple[TrainState, RestorePlan] | None:
        """Loads the newest intact checkpoint, see ``load_newest``."""
        return load_newest(self._directory.checkpoints_path, self._experiment.identity(), spec)

    def change_ranks(self, spec: StepSpec, ledger: Ledger) -> None:
        """Continues with a state on other ranks, of which there are no snapshots or checkpoints yet.

        Args:
            spec: spec of the state.
            ledger: ledger that includes the lost token updates.
        """
        assert self._saving is None, "what is being saved is of other ranks"
        config, has_lost = self._experiment.checkpoint, ledger.tally.num_lost > self.ledger.tally.num_lost
        k = dynamic_k(ledger.k, ledger.tally.plt, config.plt_budget, ledger.num_classes) if has_lost else ledger.k
        self._split, self._host_states.room, self.ledger = split_of(spec), None, ledger.emptied(k)
        self._peer_snapshots.close()
        self._peer_snapshots = PeerSnapshots(self._split, config)

    def _continue_from(self, start: RestorePlan, after: Ledger) -> None:
        """Archives checkpoints newer than the one from which the run continues, and records the lost token updates."""
        directory = self._directory.checkpoints_path
        aside = archive_newer(directory, start.step)
        record_restore(directory, start.manifest, after)
        self._directory.log_event("restore", start.step, **restore_facts(start, after), archived=aside)


def _begin_or_fail(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[HostShard]]:
    """Starts the device-to-host copy of a checkpoint, see ``begin_pieces``.

    Errors are raised by the returned function. Raised here, they would keep this host from the next collective, for
    which the other hosts wait.
    """
    try:
        if jax.process_count() > 1 and not spec.chunks.matches_stages:
            return begin_block_pieces(split, spec, state, chosen_LK)
        return begin_pieces(split, *to_store(spec, state), chosen_LK)
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)


def _fail(error: Exception) -> NoReturn:
    raise error


class SaverThread:
    """A thread that writes one state at a time, and retries failed attempts as decided by a ``Saver``."""

    def __init__(self) -> None:
        self._executor, self._changed = one_thread("checkpoint"), Condition()
        self._saver, self._failures = saver.Saver(), list[saver.FailureReport]()

    @property
    def unsaved(self) -> int | None:
        """Iteration of the last state if it could not be saved, else None."""
        return None if (unsaved := self._saver.unsaved) is None else unsaved.step

    def begin(self, step: int, save: Callable[[], _Result]) -> Future[_Result]:
        """Calls ``save`` in the thread to save the state of iteration ``step``; no other save may be in progress."""
        self.on(saver.WriteRequest("save", step))
        return self._executor.submit(self._save, save)

    def repeat(self, write: Callable[[], _Result]) -> _Result:
        """Calls a function and returns its result; retries it after errors, with the pauses of ``RETRY_PAUSES_S``.

        Raises:
            RunError: another process owns the directory; the call is not retried.
            Exception: the error of the last attempt.
        """
        while True:
            try:
                return write()
            except Exception as error:
                self.on(saver.WriteFailed(_line_of(error), is_final=isinstance(error, RunError)))
                if not self._is_repeated():
                    raise

    def on(self, event: saver.SaveEvent) -> None:
        """Reports an event to the ``Saver``; any thread may call it."""
        with self._changed:
            self._saver, actions = self._saver.on(event, time.monotonic())
            self._failures += [action for action in actions if isinstance(action, saver.FailureReport)]
            self._changed.notify_all()

    def take_failures(self) -> list[saver.FailureReport]:
        """Returns the failed attempts since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown()

    def _save(self, save: Callable[[], _Result]) -> _Result:
        try:
            result = save()
        except BaseException as error:  # the saver already knows of an error that ``repeat`` raised
            self.on(saver.WriteFailed(_line_of(error), is_final=True, is_invalid=isinstance(error, InvalidState)))
            raise
        self.on(saver.Written())
        return result

    def _is_repeated(self) -> bool:
        """Waits for the pause to end, and returns whether there is another attempt."""
        with self._changed:
            while (retry_at := self._saver.retry_at) is not None:
                self._changed.wait(retry_at - time.monotonic())
                self.on(saver.TimePassed())
            return self._saver.current is not None


def _line_of(error: BaseException) -> str:
    """Formats an error as one line."""
    return " ".join(f"{error}".split()) or type(error).__name__


def begin_block_pieces(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[HostShard]]:
    """Starts copying a state to the host block by block, see ``begin_pieces``; each host copies the blocks it holds.

    Args:
        split: division of a state with one row for each stage.
        spec: spec of the state.
        state: the state; may be donated after this returns.
        chosen_LK: expert classes to save for every MoE layer of the model.

    Returns:
        A function that waits for the copies and returns this host's pieces; any thread may call it.
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
    """Returns the MoE layers that a piece of an expert array covers within its stage; empty if it is padding."""
    stage, stack, *_ = piece.place
    return split.layers_of_stages[stage.start][stack]


def _chosen(split: StateSplit, piece: LocalRange, chosen_LK: np.ndarray) -> LocalRange:
    """Returns a piece with only the chosen classes, in the order in which they are saved."""
    if chosen_LK.shape[-1] == split.num_classes:
        return piece
    stage, stack, *_ = piece.place
    index_LK = split.by_stage(chosen_LK)[stage.start, stack]
    return LocalRange(piece.place, jnp.take_along_axis(piece.values, index_LK[None, :, None, :, None], axis=3))


class _WriterProcess:
    """A process that writes small arrays for the first host; it starts with this object and exits with this process.

    Args:
        run_dir: run directory. The next run in it waits until the writer process has exited.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._start()

    def write(self, path: Path, arrays: Mapping[str, np.ndarray], *, progress: Callable[[], None]) -> None:
        """Writes arrays, see ``write_arrays``; starts a new process if the previous one has exited.

        Args:
            path: directory to create.
            arrays: arrays by name.
            progress: function that is called once a second during the write.
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
        """Closes the pipe, so that the process exits, and kills the process if it does not exit in time."""
        self._pipe.close()
        self._process.join(_CLOSING_S)
        self._process.kill()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        start = multiprocessing.get_context("spawn").Process  # a forked process would inherit JAX's locks
        self._process = start(target=_serve, args=(theirs, self._run_dir), name="writer", daemon=True)
        self._process.start()
        theirs.close()  # otherwise this end would not notice that the writer has exited


def _serve(pipe: Connection, run_dir: Path) -> None:
    """Writes the arrays received through a pipe, until the pipe is closed."""
    # A signal to the whole container reaches this process too, but it still has to write the last iteration.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")  # the accelerators belong to the process that trains
    with suppress(EOFError, OSError), writes_checkpoints(run_dir):
        while True:
            pipe.send(_error_of(*pipe.recv()))
    os._exit(0)  # a regular exit may wait minutes for the threads that Orbax leaves behind after a failed save


def _error_of(path: Path, arrays: Mapping[str, Any]) -> Exception | None:
    try:
        write_arrays(path, arrays)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error))
    except Exception as error:  # errors of other libraries may not be picklable
        return ValueError(str(error))
    return None


class HostStates:
    """Saves states on this host, in agreement with the other hosts of the run.

    Args:
        directory: run directory.
        hosts: hosts of the run, possibly only one.

    Attributes:
        room: last state that was copied, on a single host; its buffers are reused for the next state.
        bytes_of_hosts: bytes of values that each host wrote in the last checkpoint; only set on the first of several
            hosts.
    """

    def __init__(self, directory: RunDirectory, hosts: Hosts):
        self._directory, self._hosts = directory, hosts
        self._writer = _WriterProcess(directory.path) if hosts.count > 1 and hosts.is_first else None
        self._write: Callable[..., Manifest] | None = None
        self.room: Snapshot | None = None
        self.bytes_of_hosts: list[int] = []

    def agree(self, step: int, chosen_LK: np.ndarray) -> tuple[Save, np.ndarray]:
        """Waits for all hosts; returns the identity of the save and the expert classes that the first host chose."""
        local_choice = secrets.token_hex(4), chosen_LK.shape, chosen_LK.reshape(-1).tolist()
        token, shape, chosen = self._hosts.broadcast(local_choice)
        return Save(step, token), np.array(chosen, chosen_LK.dtype).reshape(shape)

    def save(
        self,
        save: Save,
        split: StateSplit,
        chosen_LK: np.ndarray,
        finish: Callable[[], list[HostShard]],
        repeat: Callable[[Callable[[], Any]], Any],
        facts: Mapping[str, Any],
    ) -> Manifest | None:
        """Writes this host's part of a checkpoint; may be called in any thread.

        Args:
            save: identity of the save.
            split: division of the state.
            chosen_LK: expert classes to save, ``[L, K]``.
            finish: function that waits for this host's pieces and returns them.
            repeat: function that calls another one and retries it, see ``SaverThread.repeat``. A single host uses it to
                write the checkpoint, and the first of several hosts to create the files, for which the others wait.
            facts: keyword arguments of ``save_checkpoint``.

        Returns:
            The manifest on the first host; None on the other hosts, which print their errors to stderr.

        Raises:
            InvalidState: a value of the model is not finite.
            Exception: the first host could not write its part, or another host failed.
        """
        if self._hosts.count == 1:
            snapshot = self._assembled(split, finish, chosen_LK)
            self._write = partial(save_checkpoint, step=save.step, split=split, **facts)
            manifest: Manifest = repeat(partial(self._write_whole, self._write, snapshot))
            return manifest
        host_save = HostSave(
            self._directory.checkpoints_path, save, self._hosts.index, self._hosts.count, split, chosen_LK
        )
        try:
            pieces = _now(finish)
            if self._writer is not None:
                repeat(partial(self._begin, host_save, self._writer))
            else:
                host_save.wait()
            return self._write_part(host_save, pieces, facts)
        except Exception as error:
            host_save.board.give_up(error)
            if self._hosts.is_first:
                raise
            if not isinstance(error, HostFailed | InvalidState):  # the first host reports these
                text = f"host {self._hosts.index}: its part of the checkpoint of iteration {save.step} was not written"
                print(f"swift: {text}: {first_line(error)}", file=sys.stderr)
            return None

    def keep(self, step: int) -> str:
        """Writes the last state to a fallback directory; returns a line that says where it is, or why it is lost."""
        room, write = self.room, self._write
        if room is None or write is None:
            return saver.nothing_kept(step)
        try:
            return save_fallback(self._directory.checkpoints_path, step, lambda place: write(place, snapshot=room))
        except RunError as error:
            return saver.FailureReport(saver.WriteRequest("fallback", step), str(error)).line

    def _assembled(self, split: StateSplit, finish: Callable[[], list[HostShard]], chosen_LK: np.ndarray) -> Snapshot:
        """Assembles the whole state on the host; raises InvalidState if a value of the model is not finite."""
        room, self.room = self.room, None  # partly overwritten buffers must not be mistaken for a state
        snapshot = assemble_snapshot(split, finish(), chosen_LK, room)
        dense = (array for name, array in snapshot.dense.items() if is_model_array(name))
        if not all(map(is_finite, (*dense, *snapshot.blocks.values()))):
            raise InvalidState("its values are not finite")
        self.room = snapshot
        return snapshot

    def _prepare(self) -> None:
        self._directory.check()  # another process may have taken over the directory
        sync_record(self._directory.path)  # the checkpoint must not outlive the records that its ledger counts

    def _write_whole(self, write: Callable[..., Manifest], snapshot: Snapshot) -> Manifest:
        self._prepare()
        return write(self._directory.checkpoints_path, snapshot=snapshot)

    def _begin(self, save: HostSave, writer: _WriterProcess) -> None:
        self._prepare()
        save.begin(partial(writer.write, progress=save.board.sign))

    def _write_part(
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
        """Stops the writer process, if there is one."""
        if self._writer is not None:
            self._writer.close()


def _now(finish: Callable[[], list[HostShard]]) -> Callable[[], list[HostShard]]:
    """Waits for a copy at once, since it takes up device memory; returns a function that returns or raises its outcome.

    Args:
        finish: function that waits for the copy and returns this host's pieces.
    """
    try:
        pieces = finish()
    except (RuntimeError, MemoryError) as error:  # no memory, on the devices or on the host
        return partial(_fail, error)
    return lambda: pieces


def _finite(pieces: list[HostShard]) -> list[HostShard]:
    """Returns the pieces; raises InvalidState if a value of the model is not finite."""
    if not all(is_finite(piece.values) for piece in pieces if is_model_array(piece.name)):
        raise InvalidState("its values are not finite")
    return pieces
