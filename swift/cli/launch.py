"""``swift launch``: the supervisor of a run, and the processes that it starts."""

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

import jax
from rich.console import Console

from swift.cli.commands import new_run_dir, show_run
from swift.cli.configuration import config_text, load_experiment
from swift.errors import SettingError
from swift.files import replace_file
from swift.launch.chaos import parse_chaos
from swift.launch.member import Crew, Part
from swift.launch.supervisor import Supervisor
from swift.mesh.distributed import check_support
from swift.mesh.epochs import Deadlines, Process, processes_of
from swift.record import check_new_run, measure, read_run
from swift.schedules import FAULT_FREE
from swift.train import Experiment
from swift.train.interrupt import Interrupt


def launch(options: argparse.Namespace) -> None:
    """``swift launch --processes N CONFIG.gin``."""
    experiment = load_experiment(options.config, options.set)
    processes = processes_of(experiment.topology)
    if options.processes != len(processes):
        allowed = f"must be {len(processes)}, one for each worker of {experiment.topology}"
        raise SettingError("--processes", options.processes, allowed)
    _check(experiment)
    chaos = parse_chaos(options.chaos, experiment.topology, experiment.num_steps)
    check_support()
    run_dir = options.run_dir or new_run_dir(options.config.stem)
    check_new_run(run_dir)
    experiment.loader("train")  # so that a mistake in the data is told once, and here
    with tempfile.TemporaryDirectory(prefix="swift-") as scratch:
        config, logs = Path(scratch) / "config.gin", run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        replace_file(config, config_text(experiment).encode())

        def command(process: Process) -> list[str]:
            own = [str(config), str(process), str(run_dir), str(Path(scratch) / "programs")]
            return [sys.executable, "-m", "swift", "member", *own]

        tell = Console(stderr=True, highlight=False, markup=False).print
        with (
            Interrupt() as interrupt,
            Supervisor(processes, command, os.environ, logs, Deadlines(), chaos, tell) as supervisor,
        ):
            supervisor.run(lambda: interrupt.requested)
            if interrupt.requested:
                raise KeyboardInterrupt
    run = read_run(run_dir)
    show_run(run, measure(run, experiment.target_loss), options.format)


def member(options: argparse.Namespace) -> None:
    """A process of a run; not for people."""
    experiment = load_experiment(options.config)
    pipeline, stage = map(int, options.worker.split(":"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", experiment.topology.num_expert_ranks)
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    jax.config.update("jax_enable_compilation_cache", False)  # the run has a store of its own
    part = Part(experiment, config_text(experiment), (pipeline, stage), options.run_dir, options.programs)
    try:
        Crew(part, sys.stdin).run()
    except SettingError:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # in peace it might wait for peers in XLA


def _check(experiment: Experiment) -> None:
    """Raises SettingError where an experiment asks for what real processes cannot do, so far or at all."""
    not_yet = "a run of several processes does neither evaluate nor save yet"
    refused = {
        "eval_every": (experiment.eval_every != 0, f"must be 0: {not_yet}"),
        "checkpoint_every": (experiment.checkpoint_every != 0, f"must be 0: {not_yet}"),
        "failures": (bool(experiment.failures), "must be empty: processes fail for real, see --chaos"),
        "planner": (experiment.planner in FAULT_FREE, "plans without failures only"),
        "move_roles": (experiment.move_roles, "must be False: a process keeps its stage"),
        "ranks": (experiment.ranks != "emulated", "must be 'emulated': processes run on the CPU so far"),
    }
    for name, (is_wrong, allowed) in refused.items():
        if is_wrong:
            raise SettingError(f"Experiment.{name}", getattr(experiment, name), allowed)
