"""Runs of a comparison as processes, several at a time: each is ``swift train`` in its own directory.

A run that fails does not stop the others. A signal makes every run save its state and end.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from swift.cli.runs_display import RunsDisplay
from swift.cli.standing import Standing, standing_of
from swift.config.sweep import ComparedRun
from swift.errors import RunError, SettingError, check_count, printable
from swift.machine import cores_allowed, cores_limit
from swift.runlog.lease import living_owner
from swift.runlog.reading import is_run
from swift.tasks import retried
from swift.train.interrupt import Interrupt
from swift.train.start import made_directory
from swift.typed import SourceText

_POLL_S = 0.2
_START_S = 20.0
"""Seconds for which a failed start of a process is repeated."""
_TAIL_BYTES = 8192
_OVER: tuple[Standing, ...] = ("ended", "diverged")
DIVERGED = "its loss was not finite, and resumed it would be the same; remove its directory to run it again"
_PASSED_ON = ("log_every", "input_hosts", "key_file")
"""Options with a value that ``train`` has, too."""


def run_processes(runs: Sequence[ComparedRun], top: Path, options: argparse.Namespace) -> dict[str, str]:
    """Runs what has not ended yet, up to ``--jobs`` runs at a time.

    Args:
        runs: all runs of the comparison.
        top: directory of the comparison. Besides the directory of a run NAME, it gets NAME.log with the run's output.
        options: options of the command.

    Returns:
        For each run that has failed, by name, the reason.

    Raises:
        SettingError: an option or a run cannot work. If a run only finds that out as it begins, before any run has
            made a step, all are stopped.
        KeyboardInterrupt: a signal; every run that had begun is saved.
    """
    if options.coordinator is not None:
        allowed = "a sweep on several hosts runs one run for each call: add --task I"
        raise SettingError("--coordinator", options.coordinator, allowed)
    if options.jobs is not None:
        check_count("--jobs", options.jobs, least=1)
    standing = {run.name: standing_of(run.experiment, top / run.name, resume=options.resume) for run in runs}
    failures = {name: DIVERGED for name, state in standing.items() if state == "diverged"}
    todo = [run for run in runs if standing[run.name] not in _OVER]
    if not todo:
        return failures
    num_devices = _num_devices(todo)
    num_jobs = min(options.jobs or _default_jobs(todo, num_devices), len(todo))
    with made_directory(top):
        return failures | _Processes(runs, standing, top, options, num_devices).run(num_jobs)


def train_arguments(
    run: ComparedRun, top: Path, options: argparse.Namespace, *, is_resumed: bool, more: Sequence[str] = ()
) -> list[str]:
    """Returns the command line of ``swift train`` for a run of a comparison with these options, and ``more``."""
    arguments = ["train", f"--run-dir={top / run.name}", *(f"--set={text}" for text in run.overrides)]
    arguments += [
        f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _PASSED_ON if is_set(options, name)
    ]
    arguments += [f"--logger={name}" for name in options.logger] + [f"--deadline={text}" for text in options.deadline]
    arguments += ["--insecure-network"] * options.insecure_network + ["--resume"] * is_resumed
    return [*arguments, *more, "--", str(run.config)]


def is_set(options: argparse.Namespace, name: str) -> bool:
    """Returns whether an option has a value."""
    return getattr(options, name) is not None


def set_aside(run_dir: Path) -> str:
    """Renames the directory of a run that was broken off before its first checkpoint, so that the run begins again.

    Returns:
        A line that says where the old record is.

    Raises:
        SettingError: another process runs there.
    """
    if living_owner(run_dir) is not None:
        raise SettingError("--run-dir", str(run_dir), "another process runs there")
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.broken-off-{number}")).exists():
        number += 1
    run_dir.rename(aside)
    return printable(f"{run_dir.name}: had no checkpoint, begins again; its record is in {aside}")


def _num_devices(runs: Sequence[ComparedRun]) -> int:
    """Counts the GPUs that the runs may share; 0 if they run on CPU, 1 for TPUs, which serve one process at a time."""
    if all(run.experiment.ranks == "emulated" for run in runs):
        return 0
    from swift.elastic.device_probe import ask_jax

    answer = ask_jax()
    if answer.platform in (None, "cpu"):
        return 0
    return answer.count if answer.platform == "gpu" else 1


def _default_jobs(runs: Sequence[ComparedRun], num_devices: int) -> int:
    """Returns how many runs at a time have devices of their own, or a core for each of their emulated devices."""
    if num_devices:
        return max(1, num_devices // _most_devices(runs))
    most = max(_devices_of(run) for run in runs)
    return max(1, int(min(cores_allowed(), cores_limit() or cores_allowed())) // most)


def _devices_of(run: ComparedRun) -> int:
    """Counts the devices that a run uses; virtual ranks share one."""
    return 1 if run.experiment.ranks == "virtual" else run.experiment.topology.num_devices


def _most_devices(runs: Sequence[ComparedRun]) -> int:
    """Returns the most devices that any of the runs on devices uses."""
    return max((_devices_of(run) for run in runs if run.experiment.ranks != "emulated"), default=1)


@dataclass
class _Process:
    """A run in progress.

    Attributes:
        run: the run.
        popen: its process.
        place: which of the jobs it is, from 0.
    """

    run: ComparedRun
    popen: subprocess.Popen[bytes]
    place: int


class _Processes:
    """The processes of a comparison.

    Args:
        runs: all runs.
        standing: standing of each run by name.
        top: directory of the comparison.
        options: options of the command.
        num_devices: number of accelerators; 0 on CPU.
    """

    def __init__(
        self,
        runs: Sequence[ComparedRun],
        standing: Mapping[str, Standing],
        top: Path,
        options: argparse.Namespace,
        num_devices: int,
    ):
        self._standing, self._top, self._options, self._num_devices = standing, top, options, num_devices
        self._waiting = [run for run in runs if standing[run.name] not in _OVER]
        self._most_devices = _most_devices(self._waiting)
        self._running: list[_Process] = []
        self._failures: dict[str, str] = {}
        self._display = RunsDisplay(
            top, {run.name: run.experiment.num_steps for run in runs}, {run.name for run in self._waiting}
        )

    def run(self, num_jobs: int) -> dict[str, str]:
        """Runs all processes, see ``run_processes``."""
        with ExitStack() as stack:
            stack.callback(self._end_all)
            display = stack.enter_context(self._display)
            interrupt = stack.enter_context(
                Interrupt(None, lambda: display.note("stopping all runs; each saves its state"))
            )
            interrupt.hold()
            display.begin(num_jobs)
            while self._waiting or self._running:
                while self._waiting and len(self._running) < num_jobs and not interrupt.requested:
                    self._start(self._waiting.pop(0))
                if interrupt.requested:
                    self._stop_all()
                    raise KeyboardInterrupt
                time.sleep(_POLL_S)
                self._follow()
        return self._failures

    def _start(self, run: ComparedRun) -> None:
        state = self._standing[run.name]
        if state == "unsaved":
            try:
                self._display.note(set_aside(self._top / run.name))
            except SettingError as error:
                self._failures[run.name] = str(error)
                self._display.ended(run.name, str(error))
                return
        place = min({*range(len(self._running) + 1)} - {process.place for process in self._running})
        arguments = train_arguments(run, self._top, self._options, is_resumed=state == "unfinished")
        command = [sys.executable, "-m", "swift", "compared", *arguments]
        # A session of its own: the terminal's Ctrl-C reaches it only through this process.
        with self._log(run).open("ab") as log:
            popen = retried(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment(run, place)},
                    start_new_session=True,
                ),
                _START_S,
            )
        self._running.append(_Process(run, popen, place))
        self._display.started(run.name)

    def _environment(self, run: ComparedRun, place: int) -> dict[str, str]:
        """Returns the variables that give a run GPUs of its own, or that it shares if there are too few."""
        if not self._num_devices or run.experiment.ranks == "emulated":
            return {}
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        visible = visible or list(map(str, range(self._num_devices)))
        first, count = place * self._most_devices, _devices_of(run)
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[(first + at) % len(visible)] for at in range(count))}

    def _follow(self) -> None:
        """Shows the progress of the runs, and handles those that have ended."""
        for process in list(self._running):
            code, name = process.popen.poll(), process.run.name
            self._display.follow(name)
            if code is None:
                continue
            self._running.remove(process)
            assert process.popen.stdin is not None
            process.popen.stdin.close()
            reason = "" if code == 0 else self._reason(process.run, code)
            if code == 2 and not self._display.has_begun:
                self._refuse(process.run, reason)
            if reason:
                self._failures[name] = reason
            self._display.ended(name, reason)

    def _refuse(self, run: ComparedRun, reason: str) -> None:
        """Ends all runs and raises the error with which the first one was refused; removes what only they have left."""
        self._stop_all()
        for name in self._standing:
            if not is_run(self._top / name):
                (self._top / f"{name}.log").unlink(missing_ok=True)
        match = re.fullmatch(r"(\S+) = (.*?): (.*)", reason)
        if match is None:
            raise RunError(f"{run.name}: {reason}")
        raise SettingError(match[1], SourceText(match[2]), match[3])

    def _stop_all(self) -> None:
        """Has every run save its state and end, and waits for them."""
        self._end_all()
        self._display.stopped()

    def _end_all(self) -> None:
        for process in self._running:
            process.popen.terminate()
        for process in self._running:
            process.popen.wait()
        self._running = []

    def _log(self, run: ComparedRun) -> Path:
        return self._top / f"{run.name}.log"

    def _reason(self, run: ComparedRun, code: int) -> str:
        """Returns why a run has failed: the last line of its output, or else how its process ended."""
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        with self._log(run).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        if code < 0 or not lines:
            return f"its process has ended ({how}); see {self._log(run)}"
        return lines[-1].removeprefix("swift: ")
