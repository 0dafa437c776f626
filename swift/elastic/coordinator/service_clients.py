"""The supervisor's clients of the two services: they start a service, restart it after its death, and kill it if late.

``CheckpointClient`` waits for all parts of a snapshot, requests saves and loads, and retries failed saves; a run cannot
continue without its service. ``CompileClient`` requests programs in advance; without its service members compile for
themselves.
"""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from swift.checkpoint.manifest import checkpoint_path, checkpoint_steps, read_manifest
from swift.checkpoint.writer import RETRY_PAUSES_S
from swift.elastic.membership.messages import Process, ShardLayout, StateId, complete_workers, covers_whole_state
from swift.elastic.transport.children import Children
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CheckpointAnswer,
    CheckpointCommand,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    LoadCheckpoint,
    Prepared,
    Reshard,
    SaveCheckpoint,
    Saved,
    SnapshotKept,
)
from swift.errors import SettingError
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Worker

CHECKPOINT_SERVICE, COMPILE_SERVICE = "checkpoint-service", "compile-service"
"""Names of the two services as child processes, in logs and in events."""
_MAX_STARTS = 3
_RECORD_S = 10.0
"""Seconds that a save waits for the record of its iteration. If all members that had the record have died, it never
comes."""


class _RecordProgress(Protocol):
    """Progress in writing the metrics of a run.

    Attributes:
        written: last iteration whose metrics are in the file, or are about to be.
        on_file: last iteration whose metrics are in the file.
    """

    written: int
    on_file: int


class CheckpointClient:
    """Sends one request at a time to the checkpoint service, and restarts the service if it dies.

    A failed save is retried after pauses, see ``RETRY_PAUSES_S``, unless a newer save is requested first. A save is
    held back until the record of its iteration is in the file: if the run ended in between, the record would be missing
    after a resume.

    Args:
        children: child processes of the run; the service is one of them.
        command: command that starts the service.
        log: log file of the service.
        directory: directory of the run's checkpoints.
        processes: processes of the run, all of them in the first generation; see ``set_processes``.
        start_s: time that the service takes to start, in seconds.
        deadline_s: time limit for an answer, in seconds; a later service is killed.
        record: progress of the run's record.
        own_cut: workers that hold each chunk in the run's own cut; falsy if each stage is one chunk.
        has_origin: whether the run begins with the weights of another run, which the service can load.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        *,
        children: Children,
        command: Sequence[str],
        log: Path,
        directory: Path,
        processes: Sequence[Process],
        start_s: float,
        deadline_s: float,
        record: _RecordProgress,
        own_cut: ChunkAssignment = DEFAULT_ASSIGNMENT,
        has_origin: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log, self._directory = children, command, log, directory
        self._has_origin, self._own_cut = has_origin, own_cut
        self._run, self._cuts = tuple(processes), dict[int, ChunkAssignment]()
        self.set_processes(processes)
        self._parts: dict[StateId, set[Process]] = {}
        self._requests: list[CheckpointCommand] = []  # in order; the first one has been sent, or is held back
        self._record, self._is_held, self._requested_at = record, False, 0.0
        self._start_s, self._deadline_s, self._clock = start_s, deadline_s, clock
        self._ready_by = 0.0  # time by which the service should have started
        # When the request in progress was sent; None: there is none, or the service is being killed.
        self._sent_at: float | None = None
        self._num_starts = 0  # consecutive starts without an answer in between
        self._unsaved: SaveCheckpoint | None = None  # newest save, if it has failed
        self._num_failures = 0
        self._retry_at: float | None = None

    def set_processes(
        self, processes: Sequence[Process], generation: int = 0, cut: ChunkAssignment = DEFAULT_ASSIGNMENT
    ) -> None:
        """Sets the processes of a new generation, from which it follows when a snapshot is complete.

        Args:
            processes: processes of the generation.
            generation: number of the generation.
            cut: workers that hold each block in its states; falsy: the run's own cut.
        """
        if cut:
            self._cuts[generation] = cut
        workers = {process.worker for process in processes}
        # Snapshots that a worker stored before it died still count, so lost workers stay in the list with all ranks. A
        # worker that is present has only the ranks of this generation.
        self._processes = (*processes, *(process for process in self._run if process.worker not in workers))

    @property
    def newest(self) -> int | None:
        """Iteration of the newest checkpoint on disk; None: there is none."""
        return max(checkpoint_steps(self._directory), default=None)

    @property
    def newest_loadable(self) -> int | None:
        """Iteration of the newest state that the service can load; 0 if that is another run's weights."""
        return 0 if self.newest is None and self._has_origin else self.newest

    @property
    def newest_is_complete(self) -> bool:
        """Whether the newest checkpoint is intact and has every expert's state after its iteration."""
        newest = self.newest
        if newest is None:
            return False
        with suppress(SettingError):  # damaged
            return read_manifest(checkpoint_path(self._directory, newest), "checkpoint").is_full
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a request is unanswered, or a save is to be retried."""
        return bool(self._requests) or self._retry_at is not None

    @property
    def unsaved(self) -> SaveCheckpoint | None:
        """Newest save, if it has failed or is held back; else None."""
        request = self._requests[0] if self._is_held else None
        return request if isinstance(request, SaveCheckpoint) else self._unsaved

    @property
    def pause_s(self) -> float | None:
        """Seconds until a failed save is retried; None: no retry is due."""
        return None if self._retry_at is None else self._retry_at - self._clock()

    def start(self) -> None:
        """Starts the service unless it is running."""
        if CHECKPOINT_SERVICE not in self._children:
            self._num_starts += 1
            self._ready_by = self._clock() + self._start_s
            self._children.start(CHECKPOINT_SERVICE, self._command, self._log)
            self._send_next()

    def add(self, snapshot: SnapshotKept, *, is_full: bool = False) -> None:
        """Notes that a member has stored its part of a snapshot, and requests a save once all parts are there."""
        parts = self._parts.setdefault(snapshot.stamp, set())
        parts.add(snapshot.member.process)
        cut = self._cuts.get(snapshot.stamp.generation, DEFAULT_ASSIGNMENT)
        if covers_whole_state(self._processes, parts, cut or self._own_cut):
            self._unsaved, self._num_failures, self._retry_at = None, 0, None
            # Some ranks of an incomplete worker, which is not needed, may have stored their parts already.
            complete = complete_workers(self._processes, parts)
            holders = tuple(sorted(process for process in parts if process.worker in complete))
            self._request(SaveCheckpoint(snapshot.stamp, holders, is_full, cut=cut))
            self._parts = {stamp: parts for stamp, parts in self._parts.items() if stamp > snapshot.stamp}

    def load(self, generation: int, processes: Sequence[Process]) -> None:
        """Requests to load the newest checkpoint, after all earlier requests; a failed save is retried once before."""
        if self._unsaved is not None and self._unsaved not in self._requests:
            self._retry(self._unsaved)
        self._request(LoadCheckpoint(None, generation, tuple(processes)))

    def reshard(self, stamp: StateId, layout: ShardLayout, generation: int, processes: Sequence[Process]) -> None:
        """Requests to reshard a state for these processes."""
        self._request(Reshard(stamp, layout, generation, tuple(processes)))

    def take_answer(self, line: str) -> CheckpointAnswer:
        """Reads the answer to the request in progress, and sends the next request."""
        self._num_starts, self._ready_by = 1, self._clock()
        answer, command = CHECKPOINT_ANSWERS.read(line), self._requests.pop(0)
        if isinstance(command, SaveCheckpoint) and not command.is_elsewhere:
            self._after_save(command, is_saved=isinstance(answer, Saved))
        self._send_next()
        return answer

    def send_if_due(self) -> None:
        """Sends a save whose record has been written, and retries a failed save after its pause."""
        if self._is_held:
            self._send_next()
        if self._unsaved is not None and self._retry_at is not None and self._clock() >= self._retry_at:
            self._retry(self._unsaved)

    def save_fallback(self) -> None:
        """Requests to save an unsaved state outside the run directory, at the end of a run."""
        if (save := self.unsaved) is not None:
            self._retry_at = None
            self._request(save._replace(is_elsewhere=True))

    def died(self) -> bool:
        """Restarts the service after its death; returns False if it has died too often."""
        if self._num_starts >= _MAX_STARTS:
            return False
        if [type(command) for command in self._requests[:2]] == [SaveCheckpoint, SaveCheckpoint]:
            del self._requests[0]  # not sent again, since a newer save waits
        self.start()
        return True

    def kill_if_late(self) -> bool:
        """Kills the service if its answer is late; returns whether it was. ``died`` follows."""
        if self._sent_at is None or self._clock() <= max(self._sent_at, self._ready_by) + self._deadline_s:
            return False
        self._sent_at = None
        self._children.signal(CHECKPOINT_SERVICE, signal.SIGKILL)
        return True

    def _after_save(self, command: SaveCheckpoint, *, is_saved: bool) -> None:
        if any(isinstance(other, SaveCheckpoint | LoadCheckpoint) for other in self._requests):
            self._unsaved = None  # no retry: a newer state is to be saved, or the run resumes from another one
            return
        self._unsaved = None if is_saved else command
        self._num_failures = 0 if is_saved else self._num_failures + 1
        is_retried = 0 < self._num_failures <= len(RETRY_PAUSES_S)
        self._retry_at = self._clock() + RETRY_PAUSES_S[self._num_failures - 1] if is_retried else None

    def _retry(self, save: SaveCheckpoint) -> None:
        self._retry_at = None
        self._request(save)

    def _request(self, command: CheckpointCommand) -> None:
        """Queues a request. A newer save replaces waiting saves, whose snapshots may be gone before they are sent."""
        if isinstance(command, SaveCheckpoint):
            num_sent, self._requested_at = 0 if self._is_held else 1, self._clock()
            self._requests = [
                old
                for index, old in enumerate(self._requests)
                if index < num_sent or not isinstance(old, SaveCheckpoint)
            ]
        self._requests.append(command)
        if CHECKPOINT_SERVICE not in self._children:
            self.start()
        elif len(self._requests) == 1 or self._is_held:
            self._send_next()

    def _send_next(self) -> None:
        """Sends the first request. Only one is sent at a time, so that the pipe never fills up and blocks."""
        self._sent_at, self._is_held = None, bool(self._requests) and self._awaits_record(self._requests[0])
        if self._requests and not self._is_held:
            self._children.send(CHECKPOINT_SERVICE, CHECKPOINT_COMMANDS.line(self._requests[0]))
            self._sent_at = self._clock()

    def _awaits_record(self, command: CheckpointCommand) -> bool:
        if not isinstance(command, SaveCheckpoint) or command.is_elsewhere:
            return False
        step, has_time = command.stamp.step, self._clock() < self._requested_at + _RECORD_S
        if self._record.written < step and not (has_time and len(self._requests) == 1):
            return False  # the record is lost, or other requests wait for this save
        return self._record.on_file < step


class CompileClient:
    """Requests programs from the compile service, and restarts the service if it dies or falls silent.

    Without the service the run continues, and members compile for themselves.

    Args:
        children: child processes of the run; the service is one of them.
        command: command that starts the service; None: no programs are prepared.
        log: log file of the service.
        start_s: time limit from the start of the service to its first heartbeat, in seconds.
        silence_s: time limit between two heartbeats, in seconds. A service that is silent for longer is killed, since
            it may hold the lock of a program.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        *,
        children: Children,
        command: Sequence[str] | None,
        log: Path,
        start_s: float,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log = children, command, log
        self._start_s, self._silence_s, self._clock = start_s, silence_s, clock
        self._request: CompileRequest | None = None
        self._is_sent = False
        self._prepared: set[CompileRequest] = set()
        self._due: float | None = None  # when the next heartbeat is due; None: not running, or being killed
        self._num_starts = 0  # consecutive starts without a program compiled in between

    def request(self, request: CompileRequest) -> None:
        """Replaces the request that ``send_request`` will send."""
        self._request, self._is_sent = request, False

    def send_request(self) -> None:
        """Sends the newest request once; starts the service first if it is not running and has not died too often."""
        if self._command is None or self._request is None or self._is_sent:
            return
        if COMPILE_SERVICE not in self._children:
            if self._num_starts == _MAX_STARTS:
                return
            self._num_starts += 1
            self._children.start(COMPILE_SERVICE, self._command, self._log)
            self._due = self._clock() + self._start_s
        self._children.send(COMPILE_SERVICE, COMPILE_REQUESTS.line(self._request))
        self._is_sent = True

    def take_answer(self, line: str, time: float) -> Prepared | CutPrepared | CompileFailed | None:
        """Reads a message of the service, received at ``time``; returns None for a mere heartbeat."""
        answer = COMPILE_ANSWERS.read(line)
        if self._due is not None:
            self._due = time + self._silence_s
        if isinstance(answer, Prepared):
            self._prepared.add(CompileRequest(answer.failed, answer.num_ranks, answer.before))
            self._num_starts = 1 if answer.compiled else self._num_starts
        return None if isinstance(answer, Alive) else answer

    def is_compiled(self, worker: Worker) -> bool:
        """Returns whether programs are compiled for the case that one more process is lost, one of this worker."""
        if self._request is None:
            return False
        failed, num_ranks, cut, _ = self._request
        lost = CompileRequest(failed | {worker}, cut=cut)
        if num_ranks is not None:
            lost = CompileRequest(failed, num_ranks - 1)
        return lost in self._prepared

    @property
    def has_ended(self) -> bool:
        """Whether the service has died too often to be started again."""
        return self._num_starts == _MAX_STARTS and COMPILE_SERVICE not in self._children

    def kill_if_silent(self) -> bool:
        """Kills the service if it has been silent for too long; returns whether it was. ``died`` follows."""
        if self._due is None or self._clock() <= self._due:
            return False
        self._due = None
        self._children.signal(COMPILE_SERVICE, signal.SIGKILL)
        return True

    def died(self) -> bool:
        """Repeats the request for the next incarnation of the service; returns False if it has died too often."""
        self._due, self._is_sent = None, False
        return self._num_starts < _MAX_STARTS
