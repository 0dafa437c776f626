"""``swift launch``: the supervisor of a run, and the processes that it starts."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import jax
from rich.console import Console

from swift.cli.commands import new_run_dir
from swift.cli.configuration import config_text, load_experiment
from swift.errors import SettingError
from swift.files import replace_file
from swift.launch.chaos import parse_chaos
from swift.launch.member import Crew, Part
from swift.launch.supervisor import Supervisor
from swift.mesh.distributed import check_support
from swift.mesh.epochs import Deadlines, Process, processes_of
from swift.record import check_new_run, measure, read_run
from swift.report import comparison_table, write_report
from swift.train.interrupt import Interrupt


def launch(options: argparse.Namespace) -> None:
    """``swift launch --processes N CONFIG.gin``."""
    experiment = load_experiment(options.config, options.set)
    processes = processes_of(experiment.topology)
    if options.processes != len(processes):
        allowed = f"must be {len(processes)}, one for each worker of {experiment.topology}"
        raise SettingError("--processes", options.processes, allowed)
    for name in ("eval_every", "checkpoint_every"):
        if getattr(experiment, name):
            allowed = "must be 0: a run of several processes does neither evaluate nor save yet"
            raise SettingError(f"Experiment.{name}", getattr(experiment, name), allowed)
    if experiment.failures:
        allowed = "must be empty: processes fail for real, see --chaos"
        raise SettingError("Experiment.failures", list(experiment.failures), allowed)
    chaos = parse_chaos(options.chaos, processes)
    check_support()
    run_dir = options.run_dir or new_run_dir(options.config.stem)
    check_new_run(run_dir)
    experiment.loader("train")  # so that a mistake in the data is told once, and here
    with tempfile.TemporaryDirectory(prefix="swift-") as scratch:
        config, logs = Path(scratch) / "config.gin", run_dir / "logs"
        logs.mkdir(parents=True)
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
    write_report([run], run_dir / "report.html")
    if options.format == "json":
        print(json.dumps(measure(run, experiment.target_loss)))
    else:
        Console().print(comparison_table([run]))
        print(f"report: {run_dir / 'report.html'}")


def member(options: argparse.Namespace) -> None:
    """A process of a run; not for people."""
    experiment = load_experiment(options.config)
    pipeline, stage = map(int, options.worker.split(":"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", experiment.topology.num_expert_ranks)
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    part = Part(experiment, config_text(experiment), (pipeline, stage), options.run_dir, options.programs)
    Crew(part, sys.stdin).run()
