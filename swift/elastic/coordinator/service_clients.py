"""The supervisor's clients for the two services: they start a service, restart it after its death, and kill it if late.

``CheckpointClient`` waits for all parts of a snapshot, and requests saves and loads as ``swift.checkpoint.saver``
decides; a run cannot continue without the checkpoint service. ``CompileClient`` requests programs in advance; without
the compile service, members compile their programs themselves.
"""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from swift.checkpoint import saver
from swift.checkpoint.manifest import checkpoint_path, checkpoint_steps, read_manifest
from swift.elastic.membership.messages import Process, ShardLayout, StateId, complete_workers, covers_whole_state
from swift.elastic.reporting.reporter import Reporter
from swift.elastic.transport.children import Children
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CheckpointAnswer,
    CommandFailed,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    LoadCheckpoint,
    Prepared,
    Reshard,
    SaveCheckpoint,
    SnapshotKept,
)
from swift.errors import SettingError
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.topology import Worker

CHECKPOINT_SERVICE, COMPILE_SERVICE = "checkpoint-service", "compile-service"
"""Names of the two services as child processes, in logs and in events."""


class CheckpointClient:
    """Sends requests to the checkpoint service, and starts, kills and restarts it as a ``Saver`` decides.

    Args:
        children: child processes of the run; the service is one of them.
        command: command that starts the service.
        log: log file of the service.
        directory: directory of the run's checkpoints.
        processes: processes of the run, all of them in the first generation; see ``set_processes``.
        start_s: time that the service takes to start, in seconds.
        deadline_s: time limit for an answer, in seconds; a service that takes longer is killed.
        record: reporter, which knows how far the metrics of the run are written.
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
        record: Reporter,
        own_cut: ChunkAssignment = DEFAULT_ASSIGNMENT,
        has_origin: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log, self._directory = children, command, log, directory
        self._has_origin, self._own_cut, self._record, self._clock = has_origin, own_cut, record, clock
        self._run, self._cuts = tuple(processes), dict[int, ChunkAssignment]()
        self.set_processes(processes)
        self._parts: dict[StateId, set[Process]] = {}
        self._saver = saver.Saver(deadline_s=deadline_s, start_s=start_s, is_running=False)

    def set_processes(
        self, processes: Sequence[Process], generation: int = 0, cut: ChunkAssignment = DEFAULT_ASSIGNMENT
    ) -> None:
        """Sets the processes of a new generation, which determine when a snapshot is complete.

        Args:
            processes: processes of the generation.
            generation: number of the generation.
            cut: workers that hold each block in its states; falsy for the run's own cut.
        """
        if cut:
            self._cuts[generation] = cut
        workers = {process.worker for process in processes}
        # Snapshots that a worker stored before it died still count, so lost workers stay in the list with all ranks. A
        # worker that is present has only the ranks of this generation.
        self._processes = (*processes, *(process for process in self._run if process.worker not in workers))

    @property
    def newest(self) -> int | None:
        """Iteration of the newest checkpoint on disk; None if there is none."""
        return max(checkpoint_steps(self._directory), default=None)

    @property
    def newest_loadable(self) -> int | None:
        """Iteration of the newest state that the service can load: 0 for another run's weights, None for no state."""
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
        return self._saver.is_busy

    @property
    def unsaved(self) -> int | None:
        """Iteration of the newest state whose save has failed or is held back; None if there is none."""
        return None if (unsaved := self._saver.unsaved) is None else unsaved.step

    def add(self, snapshot: SnapshotKept, *, is_full: bool = False) -> None:
        """Records that a member has stored its part of a snapshot, and requests a save once all parts are stored."""
        parts = self._parts.setdefault(snapshot.stamp, set())
        parts.add(snapshot.member.process)
        cut = self._cuts.get(snapshot.stamp.generation, DEFAULT_ASSIGNMENT)
        if covers_whole_state(self._processes, parts, cut or self._own_cut):
            # Some ranks of an incomplete worker, which is not needed, may have stored their parts already.
            complete = complete_workers(self._processes, parts)
            holders = tuple(sorted(process for process in parts if process.worker in complete))
            command = SaveCheckpoint(snapshot.stamp, holders, is_full, cut=cut)
            self._request(saver.WriteRequest("save", snapshot.stamp.step, command))
            self._parts = {stamp: parts for stamp, parts in self._parts.items() if stamp > snapshot.stamp}

    def load(self, generation: int, processes: Sequence[Process]) -> None:
        """Requests loading the newest checkpoint, after all earlier requests; a failed save is retried once first."""
        self._request(saver.WriteRequest("load", command=LoadCheckpoint(None, generation, tuple(processes))))

    def reshard(self, stamp: StateId, layout: ShardLayout, generation: int, processes: Sequence[Process]) -> None:
        """Requests resharding a state for these processes."""
        command = Reshard(stamp, layout, generation, tuple(processes))
        self._request(saver.WriteRequest("reshard", stamp.step, command))

    def take_answer(self, line: str) -> CheckpointAnswer | saver.FailureReport:
        """Reads the answer to the request in progress, and sends the next request.

        Returns:
            The answer, or a report for the user if a write failed.
        """
        answer = CHECKPOINT_ANSWERS.read(line)
        outcome = saver.WriteFailed(answer.reason) if isinstance(answer, CommandFailed) else saver.Written()
        return next((action for action in self.on(outcome) if isinstance(action, saver.FailureReport)), answer)

    def on(self, event: saver.SaveEvent) -> tuple[saver.SaveAction, ...]:
        """Reports an event to the saver, carries out its actions on the service, and returns all of its actions."""
        self._saver, actions = self._saver.on(event, self._clock())
        for action in actions:
            match action:
                case saver.WriterAction.START:
                    self._children.start(CHECKPOINT_SERVICE, self._command, self._log)
                case saver.WriterAction.KILL:
                    self._children.signal(CHECKPOINT_SERVICE, signal.SIGKILL)
                case saver.Write(request):
                    command = request.command
                    if request.kind == "fallback":
                        command = command._replace(is_elsewhere=True)
                    self._children.send(CHECKPOINT_SERVICE, CHECKPOINT_COMMANDS.line(command))
        return actions

    def tick(self, *, has_slept: bool = False) -> tuple[saver.SaveAction, ...]:
        """Sends requests that are due, and kills the service if it is late; returns all actions, see ``on``."""
        return self._note_record() + self.on(saver.TimePassed(has_slept))

    def _request(self, request: saver.WriteRequest) -> None:
        self._note_record()
        self.on(request)

    def _note_record(self) -> tuple[saver.SaveAction, ...]:
        return self.on(saver.RecordWritten(self._record.written, self._record.on_file))


class CompileClient:
    """Requests programs from the compile service, and restarts the service if it dies or falls silent.

    Without the service the run continues, and members compile their programs themselves.

    Args:
        children: child processes of the run; the service is one of them.
        command: command that starts the service; None if no programs are to be compiled in advance.
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
            if self._num_starts == saver.MAX_STARTS:
                return
            self._num_starts += 1
            self._children.start(COMPILE_SERVICE, self._command, self._log)
            self._due = self._clock() + self._start_s
        self._children.send(COMPILE_SERVICE, COMPILE_REQUESTS.line(self._request))
        self._is_sent = True

    def take_answer(self, line: str, time: float) -> Prepared | CutPrepared | CompileFailed | None:
        """Reads a message of the service, received at ``time`` (in seconds); returns None for a heartbeat."""
        answer = COMPILE_ANSWERS.read(line)
        if self._due is not None:
            self._due = time + self._silence_s
        if isinstance(answer, Prepared):
            self._prepared.add(CompileRequest(answer.failed, answer.num_ranks, answer.before))
            self._num_starts = 1 if answer.compiled else self._num_starts
        return None if isinstance(answer, Alive) else answer

    def is_compiled(self, worker: Worker) -> bool:
        """Returns whether the programs needed after losing one more process, of this worker, are compiled."""
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
        return self._num_starts == saver.MAX_STARTS and COMPILE_SERVICE not in self._children

    def kill_if_silent(self) -> bool:
        """Kills the service if it was silent for too long; returns whether it did. Call ``died`` once it is dead."""
        if self._due is None or self._clock() <= self._due:
            return False
        self._due = None
        self._children.signal(COMPILE_SERVICE, signal.SIGKILL)
        return True

    def died(self) -> bool:
        """Makes ``send_request`` repeat the request, to a new service; returns False if the service died too often."""
        self._due, self._is_sent = None, False
        return self._num_starts < saver.MAX_STARTS
