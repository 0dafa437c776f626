"""A single run of a comparison in this process: a task of a scheduler's array, or a process of ``run_processes``."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from swift.cli.options import command_line
from swift.cli.run_processes import DIVERGED, is_set, set_aside, train_arguments
from swift.cli.standing import standing_of
from swift.cli.train import train
from swift.config.sweep import ComparedRun
from swift.errors import RunError, SettingError, printable

_OF_HOSTS = ("coordinator", "num_hosts", "host")
"""Options of a run on several hosts."""


def run_task(runs: Sequence[ComparedRun], top: Path, options: argparse.Namespace) -> None:
    """Runs the run with the number ``--task`` in this process: begins it, or resumes it if it has begun.

    Raises:
        SettingError: there is no such run, or see ``swift.cli.train.train``.
    """
    for name, value in {"--jobs": options.jobs, "--resume": options.resume or None}.items():
        if value is not None:
            raise SettingError("--task", options.task, f"runs one run, which resumes by itself; leave out {name}")
    if not 0 <= options.task < len(runs):
        allowed = f"must be from 0 to {len(runs) - 1}: the sweep has {len(runs)} runs"
        raise SettingError("--task", options.task, allowed)
    run = runs[options.task]
    state = standing_of(run.experiment, top / run.name, resume=True)
    if state == "ended":
        print(f"{printable(run.name)}: has ended already", file=sys.stderr)
        return
    if state == "diverged":
        raise RunError(f"{run.name}: {DIVERGED}")
    if state == "unsaved" and options.coordinator is None:
        print(set_aside(top / run.name), file=sys.stderr)
    more = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _OF_HOSTS if is_set(options, name)]
    more.append(f"--format={options.format}")
    arguments = train_arguments(run, top, options, is_resumed=state == "unfinished", more=more)
    train(argparse.Namespace(**{**vars(options), **vars(command_line().parse_args(arguments))}))


def compared(options: argparse.Namespace) -> None:
    """Runs ``swift compared train ...``: a run of a comparison, which saves its state and ends if its parent ends.

    At the end of a sweep several signals may arrive: the parent's, a scheduler's, and this process's own. Only the
    first counts, so that the state is saved; the parent can still kill the process.
    """
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    train(command_line().parse_args(options.arguments), ends_at_second=False)


def _end_with_parent() -> None:
    while os.read(0, 1024):  # a pipe whose only write end is in the parent
        pass
    os.kill(os.getpid(), signal.SIGTERM)
