"""A run under way: how it is started, watched, and found to be well again."""

import ctypes
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import evidence
from .place import Place
from .processes import Found, find, send
from .shapes import Shape
from .shim import Shim
from .storage import Disk
from .wire import Network

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


class Hung(Exception):
    """What should have come has not come in time."""


@dataclass
class Life:
    """One start of a run, until it ends.

    Attributes:
        number: of this life of the run, from 0.
        nodes: the process that the user started on each machine; the first decides.
        terminal: what the first has said so far.
    """

    number: int
    nodes: list[subprocess.Popen[bytes]]
    terminal: Path

    @property
    def first(self) -> subprocess.Popen[bytes]:
        """The process that decides."""
        return self.nodes[0]

    @property
    def said(self) -> str:
        """What the user has seen."""
        return self.terminal.read_text(errors="replace")


@dataclass
class Run:
    """A run directory and the lives that it has.

    Attributes:
        place: of the campaign.
        shape: of the run.
        directory: of the episode.
        run_dir: the run directory.
        network: between its machines, where it has several that are emulated.
        disk: of the run directory alone; None: it is on that of the campaign.
        shim: in all processes; None: there is none.
        meanwhile: called again and again while something is waited for: faults end when it is time.
    """

    place: Place
    shape: Shape
    directory: Path
    run_dir: Path
    network: Network | None = None
    disk: Disk | None = None
    shim: Shim | None = None
    meanwhile: Callable[[], None] = lambda: None
    lives: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tmp = self.directory / "tmp"
        self.tmp.mkdir(parents=True, exist_ok=True)
        self.mark = str(self.directory)
        self.config = self.shape.write(self.directory / "config.gin", self.place.corpus)

    @property
    def life(self) -> Life:
        """The newest."""
        return self.lives[-1]

    def command(self, node: int = 0, *, resume: bool) -> list[str]:
        """The command line of a node."""
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
        others = self.life.nodes[1:] if self.lives else []
        self.lives.append(Life(number, [], self.directory / f"terminal-{number}.txt"))
        self.life.nodes += [self.start_node(0, resume=resume), *others]
        self.start_missing_nodes()

    def start_missing_nodes(self) -> None:
        """Starts again what has ended on the machines that are not the first, as their users would."""
        nodes = self.life.nodes
        for node in range(1, self.shape.num_nodes):
            if node == len(nodes):
                nodes.append(self.start_node(node))
            elif nodes[node].poll() is not None:
                nodes[node] = self.start_node(node)

    def start_node(self, node: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
        """Starts what the user would start on one machine."""
        suffix = "" if node == 0 else f"-node{node}"
        with (self.directory / f"terminal-{self.life.number}{suffix}.txt").open("ab") as terminal:
            return self._popen(self.command(node, resume=resume), terminal)

    def beside(self, *, resume: bool) -> tuple[int | None, str]:
        """The same command once more while the run is alive: exit code (None: it did not end) and what was said."""
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
            preexec_fn=_die_with_parent,
        )

    def processes(self, *kinds: str) -> list[Found]:
        """Those of some kinds that are there now, or all."""
        return [one for one in find(self.mark) if not kinds or one.kind in kinds]

    def events(self) -> list[dict[str, Any]]:
        """All that are recorded."""
        return evidence.events(self.run_dir)

    def newest_step(self) -> int:
        """The last iteration that is recorded."""
        return evidence.newest_step(self.run_dir)

    def is_over(self) -> bool:
        """Whether the newest life has ended."""
        return self.life.first.poll() is not None

    def wait(self, is_there: Callable[[], bool], what: str, limit_s: float | None = None) -> bool:
        """Waits for something, or the end of the life.

        Args:
            is_there: whether it has come.
            what: it is, in words.
            limit_s: how long to wait; None: the campaign's patience.

        Returns:
            Whether it came; else the life has ended.

        Raises:
            Hung: neither was so in time.
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
            dead: names of members that were killed since, each as often as it was.
        """
        there = self.processes()
        if any(one.is_stopped and one.kind != "preparer" for one in there):
            return False  # on the preparer nothing depends
        if sorted(one.name for one in there if one.kind == "member") != sorted(self.shape.members):
            return False
        if self.shape.command == "train":
            return True
        events = self.events()
        told = [event["process"] for event in events[mark:] if event["event"] == "death"]
        if any(told.count(name) < dead.count(name) for name in dead):
            return False
        newest = max((n for n, event in enumerate(events) if event["event"] in ("start", "resume")), default=0)
        of_life = events[newest:]
        formed = [n for n, event in enumerate(of_life) if event["event"] == "epoch"]
        if not formed or sorted(of_life[formed[-1]]["members"]) != sorted(self.shape.members):
            return False
        return not any(event["event"] in ("death", "form", "cannot_go_on") for event in of_life[formed[-1] + 1 :])

    def finish_stopped(self) -> None:
        """Lets everybody go on who was stopped."""
        send([one.pid for one in self.processes() if one.is_stopped], signal.SIGCONT)

    def sweep(self) -> None:
        """Removes what nobody was left to remove."""
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
        """What there still is of a life that has ended, once it has had some seconds."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def _left(self) -> list[str]:
        waiting = {node.pid for node in self.life.nodes[1:]}  # for another first node, as they should
        left = [f"process {one.kind} {one.name}".strip() for one in self.processes() if one.pid not in waiting]
        left += [str(path) for pattern in ("swift-*", ".swift-*") for path in self.tmp.glob(pattern)]
        pids = [node.pid for life in self.lives for node in life.nodes if node.pid not in waiting]
        left += [str(path) for pid in pids for path in Path("/dev/shm").glob(f"*swift-{pid}-*")]
        # What the machines share waits in the run directory for another first process, which removes it; one that
        # refused to start has not.
        if self.shape.num_nodes > 1 and any(life.first.returncode == -signal.SIGKILL for life in self.lives[-2:]):
            return left
        return left + [str(path) for path in self.run_dir.glob(".swift-*")]

    def remove(self) -> None:
        """Removes the episode's directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def under_way(run: Run) -> Iterator[Run]:
    """A run of which no process outlives the block."""
    try:
        yield run
    finally:
        run.clear()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
