"""A run in progress: starts it, watches it, and finds out whether it has recovered."""

import ctypes
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import evidence
from .place import Place
from .processes import Found, find, send
from .shapes import Shape
from .shim import Shim
from .storage import Disk
from .tasks import TaskLimit
from .terminals import Terminal
from .tmpfs import Tmpfs
from .wire import Network

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


class Hung(Exception):
    """Something that was expected did not happen in time."""


@dataclass
class Life:
    """One start of a run, until it ends.

    Attributes:
        number: number of this life of the run, from 0.
        nodes: process that the user started on each machine; the first is the supervisor.
        terminal: terminal of the first.
    """

    number: int
    nodes: list[subprocess.Popen[bytes]]
    terminal: Terminal

    @property
    def first(self) -> subprocess.Popen[bytes]:
        """The supervisor, or the only process."""
        return self.nodes[0]

    @property
    def said(self) -> str:
        """Output that the user has seen."""
        return self.terminal.said


@dataclass
class Run:
    """A run directory and its lives.

    Attributes:
        place: resources of the campaign.
        shape: shape of the run.
        directory: directory of the episode.
        run_dir: run directory.
        network: network between emulated machines; None: there is none.
        disk: disk of the run directory alone; None: it is on that of the campaign.
        shim: library loaded into all processes; None: there is none.
        temporary: file system of its temporary files alone; None: they are on that of the campaign.
        tasks: limit on its threads and processes; None: there is none.
        meanwhile: called repeatedly during a wait, to end faults in time.
    """

    place: Place
    shape: Shape
    directory: Path
    run_dir: Path
    network: Network | None = None
    disk: Disk | None = None
    shim: Shim | None = None
    temporary: Tmpfs | None = None
    tasks: TaskLimit | None = None
    meanwhile: Callable[[], None] = lambda: None
    lives: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = self.directory / "memory"
        self.tmp = self.memory / "tmp"  # below the mount point, which cannot be removed
        self.mark = str(self.directory)
        self._told: list[dict[str, Any]] = []
        self.config = self.shape.write(self.directory / "config.gin", self.place.corpus)

    @property
    def life(self) -> Life:
        """The newest life."""
        return self.lives[-1]

    def command(self, node: int = 0, *, resume: bool) -> list[str]:
        """Makes the command line of a node."""
        swift, own = (
            [sys.executable, "-m", "swift", self.shape.command],
            [str(self.config), "--run-dir", str(self.run_dir)],
        )
        words = [*swift, *own, *self.shape.arguments()]
        if self.shape.num_nodes > 1:
            words += ["--nodes", str(self.shape.num_nodes), "--node", str(node)]
            words += ["--listen", "127.0.0.1"] if self.network is None else ["--insecure-network"]
        wrap = [] if self.network is None else self.network.wrap(node)
        return [*wrap, *words, *(["--resume"] if resume and node == 0 else [])]

    def start(self, *, resume: bool) -> None:
        """Begins another life."""
        number = len(self.lives)
        self.tmp.mkdir(parents=True, exist_ok=True)
        others = self.life.nodes[1:] if self.lives else []
        self.lives.append(Life(number, [], Terminal(self.directory / f"terminal-{number}.txt")))
        self.life.nodes += [self.start_node(0, resume=resume), *others]
        self.start_missing_nodes()

    def start_missing_nodes(self) -> None:
        """Restarts what has ended on all machines except the first, as their users would."""
        nodes = self.life.nodes
        for node in range(1, self.shape.num_nodes):
            if node == len(nodes):
                nodes.append(self.start_node(node))
            elif nodes[node].poll() is not None:
                nodes[node] = self.start_node(node)

    def start_node(self, node: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
        """Starts the process that the user would start on a machine."""
        if node == 0:
            return self._popen(self.command(resume=resume), self.life.terminal.writer)
        with (self.directory / f"terminal-{self.life.number}-node{node}.txt").open("ab") as terminal:
            return self._popen(self.command(node, resume=resume), terminal)

    def beside(self, *, resume: bool) -> tuple[int | None, str]:
        """Runs the same command while the run is alive; returns its exit code (None: it did not end) and its output."""
        path = self.directory / "terminal-beside.txt"
        with path.open("wb") as terminal:
            rival = self._popen(self.command(resume=resume), terminal)
        deadline = time.monotonic() + self.place.patience_s
        while (code := rival.poll()) is None and time.monotonic() < deadline:
            self.meanwhile()
            time.sleep(_POLL_S)
        rival.kill()
        rival.wait()
        return code, path.read_text(errors="replace")

    def _popen(self, command: list[str], terminal: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            cwd=self.place.root,
            env=self.place.environment(self.mark, self.tmp, {} if self.shim is None else self.shim.environment),
            start_new_session=True,
            preexec_fn=self._begin_process,
        )

    def _begin_process(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.tasks is not None:
            self.tasks.join()

    def processes(self, *kinds: str) -> list[Found]:
        """Finds the processes of some kinds, or all."""
        return [one for one in find(self.mark) if not kinds or one.kind in kinds]

    def events(self) -> list[dict[str, Any]]:
        """Reads all recorded events; while the disk gives errors only, those that were read last."""
        with suppress(OSError):
            self._told = evidence.events(self.run_dir)
        return self._told

    def newest_step(self) -> int:
        """Reads the last recorded iteration."""
        return evidence.newest_step(self.run_dir)

    def is_over(self) -> bool:
        """Whether the newest life has ended."""
        return self.life.first.poll() is not None

    def wait(self, is_there: Callable[[], bool], what: str, limit_s: float | None = None) -> bool:
        """Waits for something, or the end of the life.

        Args:
            is_there: returns whether it has happened.
            what: description for the error.
            limit_s: time limit in seconds; None: the campaign's patience.

        Returns:
            True if it has happened; False if the life has ended.

        Raises:
            Hung: neither happened in time.
        """
        limit_s = self.place.patience_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while not is_there():
            if self.is_over():
                return is_there()
            self.start_missing_nodes()
            self.meanwhile()
            if time.monotonic() > deadline:
                raise Hung(f"after {limit_s:.0f} s: {what}")
            time.sleep(_POLL_S)
        return True

    def is_well(self, mark: int, dead: Sequence[str]) -> bool:
        """Whether all processes run iterations together.

        Args:
            mark: number of events before the faults.
            dead: names of members that were killed since, each once for every kill.
        """
        there = self.processes()
        if any(one.is_stopped and one.kind != "compile-service" for one in there):
            return False  # a stopped compile service holds nothing up
        if sorted(one.name for one in there if one.kind == "worker") != sorted(self.shape.members):
            return False
        if self.shape.command == "train":
            return True
        events = self.events()
        told = [event["process"] for event in events[mark:] if event["event"] == "process_died"]
        if any(told.count(name) < dead.count(name) for name in dead):
            return False
        newest = max((n for n, event in enumerate(events) if event["event"] in ("start", "resume")), default=0)
        of_life = events[newest:]
        formed = [n for n, event in enumerate(of_life) if event["event"] == "generation_live"]
        if not formed or sorted(of_life[formed[-1]]["members"]) != sorted(self.shape.members):
            return False
        return not any(
            event["event"] in ("process_died", "generation_forming", "cannot_continue")
            for event in of_life[formed[-1] + 1 :]
        )

    def finish_stopped(self) -> None:
        """Continues all processes that were stopped."""
        send([one.pid for one in self.processes() if one.is_stopped], signal.SIGCONT)

    def sweep(self) -> None:
        """Removes the files of processes that were killed before they could do so."""
        memory = Path("/dev/shm").glob("*swift-*") if self.place.is_private else ()
        for path in [*self.tmp.glob("*swift-*"), *self.run_dir.glob(".swift-*"), *memory]:
            shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Kills all processes of the run."""
        for _ in range(40):
            left = self.processes()
            for life in self.lives:
                for node in life.nodes:
                    node.poll()
            if not left:
                return
            send([one.pid for one in left], signal.SIGKILL)
            time.sleep(_POLL_S)

    def leftovers(self, patience_s: float = 20.0) -> list[str]:
        """Lists what is left of a life that has ended, after waiting some seconds for it to go."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def _left(self) -> list[str]:
        waiting = {node.pid for node in self.life.nodes[1:]}  # for another first node, as intended
        left = [f"process {one.kind} {one.name}".strip() for one in self.processes() if one.pid not in waiting]
        left += [str(path) for pattern in ("swift-*", ".swift-*") for path in self.tmp.glob(pattern)]
        pids = [node.pid for life in self.lives for node in life.nodes if node.pid not in waiting]
        left += [str(path) for pid in pids for path in Path("/dev/shm").glob(f"*swift-{pid}-*")]
        # Files that the machines share stay in the run directory until another first process removes them; one that
        # refused to start did not. A first process that can start no thread is aborted.
        is_killed = any(life.first.returncode in (-signal.SIGKILL, -signal.SIGABRT) for life in self.lives[-2:])
        if self.shape.num_nodes > 1 and is_killed:
            return left
        return left + [str(path) for path in self.run_dir.glob(".swift-*")]


@contextmanager
def under_way(run: Run) -> Iterator[Run]:
    """Yields a run, and kills all its processes after the block."""
    try:
        yield run
    finally:
        run.clear()
