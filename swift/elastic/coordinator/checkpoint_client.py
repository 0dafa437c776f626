"""Client of the checkpoint service: collects the parts of states, requests saves and loads, and retries them."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from swift.checkpoint import RETRY_PAUSES_S, checkpoint_path, checkpoint_steps, read_manifest
from swift.elastic.membership import Process, ShardLayout, Stamp
from swift.elastic.transport import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CheckpointAnswer,
    CheckpointCommand,
    Children,
    LoadCheckpoint,
    Reshard,
    SaveCheckpoint,
    Saved,
    SnapshotKept,
)
from swift.errors import SettingError

KEEPER = "keeper"
"""The name of the keeper among the children."""
_MAX_LIVES = 3


class CheckpointClient:
    """Asks the keeper, a process of its own, for one thing at a time; if it dies it is restarted and asked again.

    A save that has failed is asked for again after pauses, see ``RETRY_PAUSES_S``, unless a newer one comes first.

    Args:
        children: the processes among which the keeper is.
        command: the command that starts it.
        log: the file for what it prints.
        directory: the directory of the run's checkpoints.
        processes: the processes of the first generation, see ``set_processes``.
        start_s: the time that a keeper takes to start, in seconds.
        deadline_s: the time limit of an answer, in seconds; a keeper that is later is killed.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        children: Children,
        command: Sequence[str],
        log: Path,
        directory: Path,
        processes: Sequence[Process],
        start_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log, self._directory = children, command, log, directory
        self.set_processes(processes)
        self._parts: dict[Stamp, dict[tuple[int, int], Process]] = {}
        self._asked: list[CheckpointCommand] = []
        self._start_s, self._deadline_s, self._clock = start_s, deadline_s, clock
        self._ready_by = 0.0  # when the keeper has to have started
        self._asked_at: float | None = None  # what the keeper is at; None: nothing, or it is being ended
        self._num_lives = 0
        self._unsaved: SaveCheckpoint | None = None  # what has failed; None: the newest save is there, or under way
        self._num_failures = 0
        self._again_at: float | None = None

    def set_processes(self, processes: Sequence[Process]) -> None:
        """Sets the processes of the generation; a checkpoint has a part of each of their stages and ranks."""
        self._num_parts = len({(stage, rank) for (_, stage), rank in processes})

    @property
    def newest(self) -> int | None:
        """The iteration of the newest checkpoint."""
        return max(checkpoint_steps(self._directory), default=None)

    @property
    def newest_is_full(self) -> bool:
        """Whether the newest checkpoint is sound and holds the state of every expert after its iteration."""
        newest = self.newest
        if newest is None:
            return False
        with suppress(SettingError):  # damaged
            return read_manifest(checkpoint_path(self._directory, newest), "checkpoint").is_full
        return False

    @property
    def is_busy(self) -> bool:
        """Whether something was asked for that has not been answered, or a save is to be tried again."""
        return bool(self._asked) or self._again_at is not None

    @property
    def unsaved(self) -> SaveCheckpoint | None:
        """The newest save, where it has failed."""
        return self._unsaved

    @property
    def pause_s(self) -> float | None:
        """How long a save that has failed waits until it is tried again; None: it is not."""
        return None if self._again_at is None else self._again_at - self._clock()

    def start(self) -> None:
        """Starts the keeper, unless it is there."""
        if KEEPER not in self._children:
            self._num_lives += 1
            self._ready_by = self._clock() + self._start_s
            self._children.start(KEEPER, self._command, self._log)
            self._say_next()

    def add(self, snapshot: SnapshotKept, *, is_full: bool = False) -> None:
        """Notes that a member has its part of a state; once every stage has one, the state is saved."""
        (_, stage), rank = process = snapshot.member.process
        parts = self._parts.setdefault(snapshot.stamp, {})
        parts[stage, rank] = process
        if len(parts) == self._num_parts:
            self._unsaved, self._num_failures, self._again_at = None, 0, None
            self._ask(SaveCheckpoint(snapshot.stamp, tuple(sorted(parts.values())), is_full))
            self._parts = {stamp: parts for stamp, parts in self._parts.items() if stamp > snapshot.stamp}

    def load(self, generation: int, processes: Sequence[Process]) -> None:
        """Asks for the parts of the newest checkpoint that is there when what was asked before is done.

        What could not be saved is tried once more before.
        """
        if self._unsaved is not None and self._unsaved not in self._asked:
            self._try_again(self._unsaved)
        self._ask(LoadCheckpoint(None, generation, tuple(processes)))

    def recut(self, stamp: Stamp, cut: ShardLayout, generation: int, processes: Sequence[Process]) -> None:
        """Asks for a state to be resharded for these processes."""
        self._ask(Reshard(stamp, cut, generation, tuple(processes)))

    def hear(self, line: str) -> CheckpointAnswer:
        """Takes the answer of the keeper to its first request."""
        self._num_lives, self._ready_by = 1, self._clock()
        answer, command = CHECKPOINT_ANSWERS.read(line), self._asked.pop(0)
        if isinstance(command, SaveCheckpoint) and not command.is_elsewhere:
            self._note_save(command, is_saved=isinstance(answer, Saved))
        self._say_next()
        return answer

    def try_again_if_due(self) -> None:
        """Asks again for a save that has failed, once it has waited."""
        if self._unsaved is not None and self._again_at is not None and self._clock() >= self._again_at:
            self._try_again(self._unsaved)

    def keep_elsewhere(self) -> None:
        """Asks for what could not be saved to be kept where there is room, now that nothing follows."""
        if self._unsaved is not None:
            self._again_at = None
            self._ask(self._unsaved._replace(is_elsewhere=True))

    def died(self) -> bool:
        """Restarts the keeper after a death, and returns whether it did."""
        if self._num_lives >= _MAX_LIVES:
            return False
        if [type(command) for command in self._asked[:2]] == [SaveCheckpoint, SaveCheckpoint]:
            del self._asked[0]  # it waits again, and a newer one does, too
        self.start()
        return True

    def end_if_late(self) -> bool:
        """Kills the keeper where its answer is late, and returns whether it was; its death follows."""
        if self._asked_at is None or self._clock() <= max(self._asked_at, self._ready_by) + self._deadline_s:
            return False
        self._asked_at = None
        self._children.signal(KEEPER, signal.SIGKILL)
        return True

    def _note_save(self, command: SaveCheckpoint, *, is_saved: bool) -> None:
        if any(isinstance(other, SaveCheckpoint | LoadCheckpoint) for other in self._asked):
            self._unsaved = None  # a newer one is on its way, or all resume from another state
            return
        self._unsaved = None if is_saved else command
        self._num_failures = 0 if is_saved else self._num_failures + 1
        has_tries = 0 < self._num_failures <= len(RETRY_PAUSES_S)
        self._again_at = self._clock() + RETRY_PAUSES_S[self._num_failures - 1] if has_tries else None

    def _try_again(self, save: SaveCheckpoint) -> None:
        self._again_at = None
        self._ask(save)

    def _ask(self, command: CheckpointCommand) -> None:
        """Saves that wait are dropped for a newer one: their parts may be gone by the time that they are due."""
        if isinstance(command, SaveCheckpoint):
            self._asked = [
                old for nth, old in enumerate(self._asked) if nth == 0 or not isinstance(old, SaveCheckpoint)
            ]
        self._asked.append(command)
        if KEEPER not in self._children:
            self.start()
        elif len(self._asked) == 1:
            self._say_next()

    def _say_next(self) -> None:
        """One at a time, so that the pipe never fills up."""
        self._asked_at = None
        if self._asked:
            self._children.say(KEEPER, CHECKPOINT_COMMANDS.line(self._asked[0]))
            self._asked_at = self._clock()


def remedy(newest: int | None) -> str:
    """Advice to the user of a run that has stopped.

    Args:
        newest: the iteration of its newest checkpoint; None: there is none.
    """
    if newest is None:
        return "there is no checkpoint; start again in another --run-dir"
    return f"resume from the checkpoint of iteration {newest} with --resume"
