"""Campaign: episodes, one after the other, until enough faults have struck."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from . import blows, blows_damage, blows_files, blows_machine, blows_nodes
from .episode import Episode, Verdict
from .kinds import Kind
from .place import Place
from .record import Record
from .reference import Reference, code_digest
from .running import Run, under_way
from .shapes import SHAPES, Shape
from .shim import Shim
from .storage import Disk
from .tasks import TaskLimit
from .tmpfs import Tmpfs
from .volleys import Deck
from .warm import WarmPrograms
from .wire import Network

_MODULES = (blows, blows_files, blows_machine, blows_damage, blows_nodes)
KINDS = {kind.name: kind for module in _MODULES for kind in module.KINDS}
_VOLLEYS = 16
"""Limit of an episode."""
STORAGES = ("plain", "disk", "shim")
"""Resources of a run: none, a file system of its own, or file functions (and a clock) that can be made to fail."""
_TOUR = (
    ("square", "disk"),
    ("row", "shim"),
    ("nodes", "plain"),
    ("train", "disk"),
    ("ranks", "shim"),
    ("restart", "disk"),
    ("train", "shim"),
)
_VOLLEYS_OF_TOUR = 4
_COLD, _EARLY = 0.15, 0.2
"""Shares of episodes that compile all programs, and of those with faults before the first checkpoint."""


@dataclass
class Campaign:
    """State of a campaign.

    Attributes:
        place: resources that runs share.
        kinds, shapes: names of the allowed kinds of faults and shapes of runs.
        record: record of all faults.
        commit: version under test.
        tell: function that prints a line.
        is_called_off: True if the campaign is to end soon.
        struck: number of faults that have struck.
        wrong: number of episodes with a wrong verdict.
        broken: number of episodes that ended because the campaign itself failed.
    """

    place: Place
    kinds: Sequence[str]
    shapes: Sequence[str]
    record: Record
    commit: str
    tell: Callable[[str], None]
    is_called_off: Callable[[], bool]
    struck: int = 0
    wrong: int = 0
    broken: int = 0

    def episode(self, seed: int) -> None:
        """Runs an episode that is determined by its seed, as is its run."""
        rng = Random(seed)
        shape, storage = SHAPES[rng.choice(sorted(self.shapes))], rng.choice(STORAGES)
        deck = Deck(self._dealt(), rng)
        is_cold, is_early = rng.random() < _COLD, rng.random() < _EARLY
        self._episode(seed, shape, storage, deck, most=_VOLLEYS, is_cold=is_cold, is_early=is_early)

    def tour(self, seed: int) -> None:
        """Runs short episodes on runs of all shapes, until every possible kind has occurred."""
        deck = Deck(self._dealt(), Random(seed), comes_again=False)
        for shape, storage in _TOUR * 3:
            if deck.left and shape in self.shapes and not self.is_called_off():
                self._episode(seed, SHAPES[shape], storage, deck, most=_VOLLEYS_OF_TOUR)
        if left := deck.left:
            self.tell(f"have not come: {', '.join(sorted(left))}")

    def _dealt(self) -> list[Kind]:
        return [KINDS[name] for name in sorted(self.kinds)]

    def _episode(
        self,
        seed: int,
        shape: Shape,
        storage: str,
        deck: Deck,
        *,
        most: int,
        is_cold: bool = False,
        is_early: bool = False,
    ) -> None:
        """Runs an episode and keeps its files if something was wrong.

        Losses are compared with those without faults at the end, when the cores are free to compute these.
        """
        begun, verdicts = time.time(), list[Verdict]()
        with self._run(seed, shape, storage, is_cold=is_cold) as run:
            try:
                for verdict in Episode(run, KINDS, deck, is_early=is_early).volleys(most, self.is_called_off):
                    self.tell(_told(verdict))
                    verdicts.append(verdict)
                    self.struck += len(verdict.faults)
            except (OSError, subprocess.SubprocessError) as error:
                self.broken += 1
                self.tell(f"  the campaign itself failed, this volley does not count: {error}")
            run.clear()
            last = max((step for verdict in verdicts for step in verdict.losses), default=0)
            expected = Reference(self.place, shape).upto(last)
            judged = [verdict.held_against(expected) for verdict in verdicts]
            for number, (verdict, before) in enumerate(zip(judged, verdicts, strict=True)):
                if len(verdict.complaints) > len(before.complaints):
                    self.tell(_told(verdict))
                common = {"seed": seed, "volley": number, "shape": shape.name, "storage": storage}
                self.record.add(verdict, **common, commit=self.commit, begun=begun)
            if any(verdict.complaints for verdict in judged):
                self.wrong += 1
                self.tell(f"  what it left: {_keep(run)}")

    @contextmanager
    def _run(self, seed: int, shape: Shape, storage: str, *, is_cold: bool) -> Iterator[Run]:
        """Makes a run with the resources that some faults need, and removes them afterwards."""
        directory = self.place.directory / f"episode-{seed}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        run = Run(self.place, shape, directory, directory / "run")
        kept = self.place.directory / "programs" / f"{shape.name}-{code_digest(self.place.root)}"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            if self.place.is_private:
                run.temporary = Tmpfs(run.memory)
                stack.callback(run.temporary.remove)
                run.temporary.make()
            if self.place.limits_tasks:
                run.tasks = TaskLimit()
                stack.callback(run.tasks.remove)
                run.tasks.make()
            if storage == "disk" and self.place.has_disks:
                run.disk = Disk(directory / "disk")
                stack.callback(run.disk.remove)
                run.disk.make()
                run.run_dir = run.disk.directory / "run"
            if storage == "shim" and self.place.shim is not None:
                run.shim = Shim(self.place.shim, directory / "shim.control", run.run_dir)
            if shape.num_nodes > 1 and self.place.has_networks:
                run.network = Network(directory, str(seed))
                stack.callback(run.network.remove)
                run.network.make()
            has_storage = run.disk is not None or run.shim is not None
            with_what = [storage] * has_storage + ["network"] * (run.network is not None)
            self.tell(f"episode {seed}: {' with '.join([shape.name, *with_what])}{', cold' * is_cold}")
            stack.enter_context(WarmPrograms(run.tmp, kept, gives=not is_cold))
            yield stack.enter_context(under_way(run))


def _told(verdict: Verdict) -> str:
    names = " + ".join(f"{fault.kind}@{fault.moment}" for fault in verdict.faults) or "start or end"
    outcome = f"WRONG: {'; '.join(verdict.complaints)}" if verdict.complaints else "ok"
    return f"  {verdict.seconds:5.1f} s  {names}: {outcome}"


def _keep(run: Run) -> Path:
    """Copies a run's files to keep them."""
    run.clear()
    kept = run.directory.with_name(f"wrong-{run.directory.name}-{int(time.time())}")
    with suppress(shutil.Error):  # everything was copied but sockets, which cannot be
        shutil.copytree(run.directory, kept, symlinks=True, ignore=shutil.ignore_patterns("*.image", "programs"))
    return kept
