"""The process of the checkpoint service."""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

from swift.checkpoint.storage.directory import clean_up_saves
from swift.elastic.services.checkpoint_service import CheckpointService
from swift.elastic.state.run_files import RunFiles
from swift.elastic.worker.process_setup import LineWriter, configure_jax
from swift.runlog.lock.run_lock import writes_checkpoints
from swift.train.checkpoints.fork import WeightSource
from swift.train.settings.experiment import Experiment

_ORPHANED_S = 1.0
"""Longer than the system takes, after it has closed the files of a process, to give its children another parent."""


class Leaving:
    """The end of a service's process, after the last command or where nobody reads its answers any longer.

    If its supervisor was killed it removes the memory of the run: members do so, too, but the end of their coordination
    service, which is in the supervisor, may end them before they can.

    Args:
        scratch: files that the processes of the run share.
    """

    def __init__(self, scratch: RunFiles):
        self._scratch, self._supervisor, self._lock = scratch, os.getppid(), threading.Lock()

    def __call__(self) -> NoReturn:
        """Ends this process."""
        with self._lock:  # another thread that finds the same must not end the process in the midst of it
            deadline = time.monotonic() + _ORPHANED_S
            while os.getppid() == self._supervisor and time.monotonic() < deadline:
                time.sleep(0.01)
            if os.getppid() != self._supervisor:
                self._scratch.remove()
            os._exit(0)  # a regular exit would wait for threads of a failed save, which Orbax leaves behind for minutes


def run_checkpoint_service(
    experiment: Experiment,
    run_dir: Path,
    scratch: RunFiles,
    commands: TextIO,
    *,
    by_rank: bool,
    init_from: WeightSource | None = None,
) -> NoReturn:
    """Runs the process: carries out commands, and answers on standard output.

    Both are lines of ``swift.elastic.transport.checkpoint_messages``. The process ends after the last command. JAX must
    not have started.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        scratch: files that the processes of the run share.
        commands: stream of commands.
        by_rank: whether a process is an expert rank, rather than a whole worker.
        init_from: run whose weights this one begins with; None: it draws its own.
    """
    leave = Leaving(scratch)
    output = LineWriter(leave)
    configure_jax(experiment, num_devices=1)
    service = CheckpointService(
        experiment=experiment,
        checkpoints=run_dir / "checkpoints",
        snapshots=scratch.snapshots,
        by_rank=by_rank,
        data=scratch.data(),
        handed_over=scratch.handed_over,
        init_from=init_from,
    )
    try:
        with writes_checkpoints(run_dir):
            clean_up_saves(service.checkpoints)
            service.rehearse()
            service.serve(commands, output.write)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    leave()
