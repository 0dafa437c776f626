"""``swift launch``: the supervisor of a run, and the processes that it starts."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from swift.cli.commands import new_run_dir, show_run
from swift.cli.configuration import config_text, load_experiment
from swift.errors import SettingError, check_count
from swift.launch.chaos import parse_chaos
from swift.launch.children import Children
from swift.launch.display import Display, goodput_table
from swift.launch.journal import Journal
from swift.launch.reporter import Reporter
from swift.launch.saving import Saving
from swift.launch.scratch import Scratch
from swift.launch.supervisor import Supervisor, Terms
from swift.mesh.distributed import check_support
from swift.mesh.epochs import Deadlines, processes_of
from swift.record import read_run
from swift.schedules import FAULT_FREE
from swift.topology import Topology
from swift.train import Experiment
from swift.train.interrupt import Interrupt
from swift.train.start import TrainOptions, check_range, open_run, steps_done
from swift.train.summary import summarize


def launch(options: argparse.Namespace) -> None:
    """``swift launch --processes N CONFIG.gin``."""
    experiment = load_experiment(options.config, options.set)
    by_rank = _is_by_rank(options.processes, experiment.topology)
    processes = processes_of(experiment.topology, by_rank=by_rank)
    _check(experiment)
    check_count("--restarts", options.restarts, least=0)
    deadlines = _deadlines(options.deadline)
    chaos = parse_chaos(options.chaos, experiment.topology, processes, experiment.num_steps)
    check_support()
    if options.resume and options.run_dir is None:
        raise SettingError("--run-dir", "(not set)", "--resume needs the directory of the run to go on with")
    run_dir = options.run_dir or new_run_dir(options.config.stem)
    run = TrainOptions(run_dir, config_text(experiment), options.resume)
    done = steps_done(run)
    check_range(experiment, run, done, experiment.num_steps)
    experiment.loader("train")  # so that a mistake in the data is told once, and here
    with Scratch.of(run.config_text) as scratch, open_run(run, done) as directory, Interrupt() as interrupt:
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        own = [str(scratch.path), str(scratch.memory)]

        def command(name: str, *more: str) -> list[str]:
            return [sys.executable, "-m", "swift", name, *own, *(["--by-rank"] * by_rank), *more]

        keeps_all = ["--keeps-all"] if options.recovery == "restart" else []
        terms = Terms(
            processes,
            lambda process: command("member", *keeps_all, *map(str, (*process.worker, process.rank))),
            logs,
            deadlines,
            options.recovery,
            max_restarts=options.restarts,
            chaos=chaos,
            resumed=options.resume,
        )
        begun = time.monotonic()
        with Children(os.environ) as children, Display(run_dir.name, experiment.num_steps, begun) as display:
            reporter = Reporter(Journal(begun), display, directory, done)
            checkpoints = directory.checkpoints_path
            saving = Saving(children, command("keeper", str(run_dir)), logs / "keeper.log", checkpoints, processes)
            ahead = command("preparer") if options.prepare == "next" else None
            with Supervisor(terms, children, saving, ahead, reporter) as supervisor:
                supervisor.run(lambda: interrupt.requested)
            if interrupt.requested:
                raise KeyboardInterrupt
            directory.log_event("finish", experiment.num_steps)
            goodput = reporter.goodput()
            summary = summarize(experiment, directory, "cpu", goodput=goodput)
            Console(stderr=True).print(goodput_table(goodput))
    show_run(read_run(run_dir), summary, options.format)


def _deadlines(texts: Sequence[str]) -> Deadlines:
    """The deadlines of the command line, such as ``heartbeat=3``."""
    limits: dict[str, Any] = {}
    names = ("start", "forming", "heartbeat", "progress")
    for text in texts:
        name, _, seconds = text.partition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            name = ""
        if name not in names:
            raise SettingError("--deadline", text, f"must be NAME=SECONDS, with one of {', '.join(names)}")
    return replace(Deadlines(), **limits)


def _is_by_rank(num_processes: int, topology: Topology) -> bool:
    """Whether a process is an expert rank; raises SettingError where it can be neither that nor a worker."""
    num_workers, num_ranks = len(topology.workers), topology.num_devices
    if num_processes not in (num_workers, num_ranks):
        allowed = f"must be {num_workers}, one for each worker of {topology}"
        allowed += f", or {num_ranks}, one for each expert rank" if num_ranks != num_workers else ""
        raise SettingError("--processes", num_processes, allowed)
    return num_processes != num_workers


def _check(experiment: Experiment) -> None:
    """Raises SettingError where an experiment asks for what real processes cannot do."""
    refused = {
        "failures": (bool(experiment.failures), "must be empty: processes fail for real, see --chaos"),
        "planner": (experiment.planner in FAULT_FREE, "plans without failures only"),
        "move_roles": (experiment.move_roles, "must be False: a process keeps its stage"),
        "ranks": (experiment.ranks != "emulated", "must be 'emulated': processes run on the CPU so far"),
    }
    for name, (is_wrong, allowed) in refused.items():
        if is_wrong:
            raise SettingError(f"Experiment.{name}", getattr(experiment, name), allowed)
