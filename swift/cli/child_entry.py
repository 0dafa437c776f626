"""Entry points of the processes that ``swift launch`` starts: workers, checkpoint service and compile service.

Each function is named after its command, which is also the name of the process in logs and events. Imports needed by
only one process are inside its function.
"""

import argparse
import os
import sys
import traceback

from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.elastic.accelerators import MemberDevices
from swift.elastic.membership.messages import Process
from swift.elastic.state.run_files import RunFiles
from swift.elastic.worker.channel import configure_jax, wait_to_begin
from swift.errors import SettingError


def worker(options: argparse.Namespace) -> None:
    """Runs a worker process, see ``WorkerProcess``."""
    from swift.elastic.worker.worker import WorkerProcess, WorkerSpec

    experiment, scratch = _given(options)
    configure_jax(experiment, _num_devices(experiment, options.by_rank))
    process = Process((options.pipeline, options.stage), options.rank)
    worker_spec = WorkerSpec(
        experiment=experiment,
        process=process,
        by_rank=options.by_rank,
        scratch=scratch,
        memory_checkpoint_every=options.memory_checkpoint_every,
        devices=None if options.platform is None else MemberDevices(options.platform, tuple(options.device)),
        forming_s=options.forming,
    )
    try:
        # A prespawned process has imported everything by now, and waits here until it is needed.
        begin = wait_to_begin(sys.stdin, worker_spec.gone)
        WorkerProcess(worker_spec, sys.stdin).run(begin.done)
    except SettingError:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a regular exit might block in XLA's threads, waiting for peers


def checkpoint_service(options: argparse.Namespace) -> None:
    """Runs the checkpoint service, see ``run_checkpoint_service``."""
    from swift.cli.run_setup import weights_of
    from swift.elastic.services.checkpoint_service import run_checkpoint_service

    experiment, scratch = _given(options)
    origin = weights_of(options, experiment)
    run_checkpoint_service(experiment, options.run_dir, scratch, sys.stdin, by_rank=options.by_rank, init_from=origin)


def compile_service(options: argparse.Namespace) -> None:
    """Runs the compile service, see ``run_compile_service``."""
    from swift.elastic.services.compile_service import run_compile_service

    experiment, scratch = _given(options)
    num_devices = _num_devices(experiment, options.by_rank)
    run_compile_service(experiment, scratch.programs, scratch.sockets, num_devices)


def _given(options: argparse.Namespace) -> tuple[Experiment, RunFiles]:
    scratch = RunFiles(options.scratch, options.memory)
    return load_experiment(scratch.config), scratch


def _num_devices(experiment: Experiment, by_rank: bool) -> int:
    return 1 if by_rank else experiment.topology.num_expert_ranks
