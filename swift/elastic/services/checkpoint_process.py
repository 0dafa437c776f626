"""The process of the checkpoint service."""

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from swift.checkpoint import settle
from swift.elastic.services.checkpoint_service import CheckpointService
from swift.elastic.worker import settle_jax, take_output
from swift.runlog import writes_checkpoints
from swift.train import Experiment


def run_checkpoint_service(
    experiment: Experiment,
    run_dir: Path,
    keeps: Path,
    handed: Path,
    by_rank: bool,
    data: Mapping[str, Any],
    commands: TextIO,
) -> NoReturn:
    """Runs the process: follows commands, and answers on standard output.

    Both are lines of ``swift.elastic.transport.checkpoint_messages``. The process ends after the last command. JAX must
    not have started.

    Args:
        experiment: the experiment that is run.
        run_dir: the run directory.
        keeps: the directory of the processes' states, see ``SharedMemoryStore``.
        handed: the directory of the states that they hand over, see ``Handover``.
        by_rank: whether a process is an expert rank, and not a whole worker.
        data: the state of a loader of the run.
        commands: the stream of commands.
    """
    answers = take_output()
    settle_jax(experiment, num_devices=1)
    keeper = CheckpointService(experiment, run_dir / "checkpoints", keeps, by_rank, data, handed)
    try:
        with writes_checkpoints(run_dir):
            settle(keeper.checkpoints)
            keeper.rehearse()
            with suppress(BrokenPipeError):  # nobody is left to hear the answer
                keeper.serve(commands, answers)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # in peace it would wait for threads of a failed save, which Orbax leaves behind for minutes
