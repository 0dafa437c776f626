"""The commands; each function has the name of its command."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from swift.cli.configuration import load_experiment, load_stored
from swift.cli.data.serving import input_hosts_of_runs
from swift.cli.hosts import devices_of_host, joined, place_of
from swift.cli.options.deadlines import OF_ONE, deadlines_of
from swift.cli.options.kinds import Written
from swift.cli.options.outputs import PAGE, check_output
from swift.errors import SettingError, printable
from swift.mesh.emulate import EmulationError, emulate_devices
from swift.mesh.program_cache import keep_programs
from swift.runlog.analysis.measures import scalars
from swift.runlog.observer import Observer
from swift.runlog.reading import Run, read_run
from swift.runlog.trackers import TRACKERS
from swift.tools.report.compare import comparison_table
from swift.tools.report.page import write_report
from swift.topology import Topology
from swift.train.checkpoints.fork import ModelSource, WeightSource
from swift.train.checkpoints.model_directory import is_model
from swift.train.export import export_model
from swift.train.hosts.agreement import ALONE
from swift.train.options import TrainOptions
from swift.train.settings.experiment import Experiment
from swift.train.settings.stored_config import OF_RUN
from swift.train.trainer import train as run_training
from swift.variables import cache_directory

OF_TRAINING = (*OF_RUN, "Experiment.placement", "OptimizerConfig.transformation")
"""Settings of a run that its model does not need: those of ``OF_RUN``, and those of state that a model lacks."""
_QUIET = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
"""Environment in which libtpu, where it is installed, looks for a TPU without a page of its own log."""
DEVICES_PER_CORE = 12
"""Emulated devices for each core of the machine, beyond which a run is warned of."""


def train(options: argparse.Namespace) -> None:
    """``swift train CONFIG.gin``."""
    experiment = load_experiment(options.config, options.set)
    place = place_of(options)
    run_dir = run_dir_of(options)
    weights, connect = (
        weights_of(options, experiment),
        input_hosts_of_runs([experiment.data], options, has_network=options.coordinator is not None),
    )
    prepare([experiment], devices_of_host(place, [experiment]))
    run = TrainOptions(
        run_dir,
        resume=options.resume,
        stop_at=options.stop_at,
        profile=_profile_window(options.profile),
        prepare=options.prepare,
        init_from=weights,
        log_every=options.log_every,
        observers=observers_of(options),
        stopping_s=deadlines_of(options.deadline, OF_ONE).stopping,
        corpora=corpora_directory(),
        connect=connect,
    )
    with nullcontext(ALONE) if place is None else joined(place, options, {run_dir: experiment}) as hosts:
        summary = run_training(experiment, replace(run, hosts=hosts))
    if hosts.is_first:
        show_run(read_run(run_dir), summary, options.format)


def weights_of(options: argparse.Namespace, experiment: Experiment) -> WeightSource | None:
    """Finds the run or the model whose weights a new run begins with, by ``--init-from``; None: it is not given.

    Args:
        options: options of the command.
        experiment: settings of the new run, which may have classes of the user's own that the other has, too.
    """
    if options.init_from is None:
        if options.init_config is not None:
            raise SettingError("--init-config", str(options.init_config), "goes with --init-from, which is not set")
        return None
    kind, spared = (ModelSource, OF_TRAINING) if is_model(options.init_from) else (WeightSource, OF_RUN)
    theirs = load_stored(
        options.init_from,
        "--init-from",
        options.init_config,
        spared=spared,
        option="--init-config",
        beside=experiment,
    )
    return kind(options.init_from, theirs)


def observers_of(options: argparse.Namespace) -> tuple[Observer, ...]:
    """Makes the observers that a command line names."""
    return tuple(TRACKERS[name]() for name in options.logger)


def show_run(run: Run, summary: dict[str, Any], kind: str) -> None:
    """Writes the report of a run that has ended, and prints its summary as ``json`` or as a table."""
    page = run.path / "report.html"
    line = report_of([run], page, again=f"swift report {run.path}")
    if kind == "json":
        print(json.dumps(summary))
    else:
        Console().print(comparison_table([run]))
        print(line)


def report_of(runs: Sequence[Run], page: Path, again: str) -> str:
    """Writes the report of runs that have ended, which have succeeded even if it cannot be written.

    Args:
        runs: runs to show.
        page: path of the file.
        again: command that writes the report later.

    Returns:
        The line that says where the report is; empty where it could not be written.
    """
    try:
        check_output("report", page, PAGE)
    except SettingError as error:
        print(f"{error}; `{again}` with another --out FILE writes it elsewhere", file=sys.stderr)
        return ""
    try:
        write_report(runs, page)
    except OSError as error:
        print(f"{page} cannot be written: {error.strerror}; `{again}` tries again", file=sys.stderr)
        return ""
    return printable(f"report: {page}")


def report(options: argparse.Namespace) -> None:
    """``swift report RUN_DIR ...``."""
    runs = [read_run(path) for path in options.run_dirs]
    page = options.out or options.run_dirs[0] / "report.html"
    check_output("--out", page, PAGE)
    try:
        write_report(runs, page)
    except OSError as error:
        raise SettingError("--out", str(page), f"cannot be written: {error.strerror}") from error
    print(printable(str(page)))


def export(options: argparse.Namespace) -> None:
    """``swift export RUN_DIR --out MODEL``."""
    if options.dtype is not None:
        raise SettingError("--dtype", options.dtype, "goes with --format hf, which is not set")
    run = read_run(options.run_dir)
    experiment = load_stored(run.path, "RUN_DIR", options.config, spared=OF_RUN)
    prepare([experiment], num_devices=1)
    plan = export_model(experiment, options.run_dir, options.out, options.step)
    oldest = min((copy.step for copy in plan.sources.values()), default=plan.step)
    ages = f", some experts of iteration {oldest}" if oldest < plan.step else ""
    for why in plan.passed_over:
        print(f"passed over: {why}", file=sys.stderr)
    print(f"{printable(str(options.out))}: the model of iteration {plan.step}{ages}; try: swift generate {options.out}")


def distance_line(run: Run, other: Run, topology: Topology) -> str:
    """Formats the distance of losses between a run that has lost workers or ranks and one that has not."""
    _, own_T, others_T = np.intersect1d(run.metrics.steps_T, other.metrics.steps_T, return_indices=True)
    name, others_name = printable(run.name), printable(other.name)
    if not len(own_T):
        return f"{name} and {others_name} have no iteration in common, by which their losses could be compared"
    distance_T = np.abs(scalars(run, "loss")[own_T] - scalars(other, "loss")[others_T])
    fewest = f"{np.nanmin(scalars(run, 'live_workers')):.0f} of {len(topology.workers)} workers"
    if topology.num_pipelines == 1:
        num_ranks = topology.num_expert_ranks
        live = min([num_ranks, *scalars(run, "live_ranks")])
        fewest = f"{live:.0f} of {num_ranks} expert ranks"
    return (
        f"{name}: with {fewest} at the least, its loss is at most {distance_T.max():.1e} "
        f"from that of {others_name}, and {distance_T[-1]:.1e} in the end"
    )


def corpora_directory() -> Path | None:
    """Directory of indexes of corpora, which outlive their run, see ``find_index``; None: the user has no home."""
    cache = cache_directory()
    return None if cache is None else cache / "corpora"


def prepare(experiments: Sequence[Experiment], num_devices: int | None = None) -> None:
    """Configures JAX, before it starts, for all experiments of this process."""
    for name in ("ranks", "compute_dtype"):
        values = {getattr(experiment, name) for experiment in experiments}
        if len(values) > 1:
            raise SettingError(f"Experiment.{name}", sorted(values), "must be the same in all files of one comparison")
    if experiments[0].ranks == "emulated":
        num_devices = num_devices or max(experiment.topology.num_devices for experiment in experiments)
        for line in crowded(num_devices, os.cpu_count() or 1):
            print(f"swift: {line}", file=sys.stderr)
        try:
            emulate_devices(num_devices)
        except EmulationError as error:
            raise SettingError("Experiment.ranks", "emulated", str(error)) from error
    else:
        os.environ |= {name: level for name, level in _QUIET.items() if name not in os.environ}
    jax.config.update("jax_enable_x64", experiments[0].compute_dtype == "float64")
    keep_programs()


def crowded(num_devices: int, num_cores: int) -> list[str]:
    """Returns a warning if emulated devices are too many for the cores of this machine.

    >>> crowded(8, 2)
    []
    """
    if num_devices <= DEVICES_PER_CORE * num_cores:
        return []
    return [
        f"{num_devices} emulated devices on {num_cores} cores: compiling the first step takes minutes, and so may each "
        "step; fewer, by Topology or --expert-ranks, are faster, and so is training with Experiment.ranks = 'virtual'"
    ]


def run_dir_of(options: argparse.Namespace) -> Path:
    """Directory of a run; raises SettingError if it is to resume and no directory was given."""
    if options.resume and options.run_dir is None:
        raise SettingError("--run-dir", Written("(not set)"), "--resume needs the directory of the run to continue")
    return options.run_dir or new_run_dir(options.config.stem)


def new_run_dir(name: str) -> Path:
    """Default directory of a run."""
    return Path("runs") / f"{name[:100]}-{datetime.now():%Y%m%d-%H%M%S}"


def _profile_window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise SettingError("--profile", text, "must be FIRST:LAST, such as 10:12")
    return int(numbers[1]), int(numbers[2])
