"""``swift train``, ``report`` and ``export``, and what other commands that train need of them.

Each command's function has its name. The last part concerns ``train`` and ``compare`` on several hosts: which of them
this is, and whether all of them run the same.
"""

import argparse
import ipaddress
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from swift.cli.data import input_hosts_of_runs
from swift.cli.values import OF_ONE, PAGE, check_output, deadlines_of
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment, load_stored
from swift.config.stored import OF_RUN, config_text
from swift.errors import SettingError, check_count, printable
from swift.files import this_program
from swift.hub.exporting import export_model
from swift.mesh.devices import EmulationError, emulate_devices, keep_programs
from swift.report.compare import comparison_table
from swift.report.page import write_report
from swift.runlog.lease import living_owner
from swift.runlog.observers import Observer
from swift.runlog.reading import Run, read_run, scalars
from swift.runlog.trackers import TRACKERS
from swift.topology import Topology
from swift.train.hosts import ALONE, HostPlace, Hosts, join_hosts, own_devices
from swift.train.initial_weights import ModelSource, WeightSource
from swift.train.model_directory import is_model
from swift.train.start import TrainOptions
from swift.train.trainer import train as run_training
from swift.typed import Written
from swift.variables import cache_directory

_SAME = ("resume", "stop_at", "profile", "init_from")
"""Options that all hosts have to be given alike."""

OF_TRAINING = (*OF_RUN, "Experiment.placement", "OptimizerConfig.transformation")
"""Settings of a run that its model does not need: those of ``OF_RUN``, and those of state that a model lacks."""
_QUIET = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
"""Environment in which libtpu, where it is installed, looks for a TPU without a page of its own log."""
_DEVICES_PER_CORE = 12
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
    if num_devices <= _DEVICES_PER_CORE * num_cores:
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


def place_of(options: argparse.Namespace) -> HostPlace | None:
    """Returns this host's place among several; None: the run is on one host.

    Raises:
        SettingError: an option is missing or out of range.
    """
    address, count, own = options.coordinator, options.num_hosts, options.host
    if address is None:
        for name, value in (("--num-hosts", count), ("--host", own)):
            if value is not None:
                raise SettingError(name, value, "goes with --coordinator, which is not set")
        return None
    if options.run_dir is None:
        raise SettingError("--run-dir", Written("(not set)"), "several hosts need a directory that they share")
    if count is not None:
        check_count("--num-hosts", count, least=1)
    if own is not None:
        check_count("--host", own, least=0)
        if count is not None and own >= count:
            raise SettingError("--host", own, f"must be below --num-hosts = {count}: hosts are numbered from 0")
    if address == "auto":
        return HostPlace(None, count, own)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise SettingError("--coordinator", address, "must be HOST:PORT, or auto")
    for name, value in (("--num-hosts", count), ("--host", own)):
        if value is None:
            raise SettingError(name, Written("(not set)"), "has to be given with an address as --coordinator")
    if not options.insecure_network and not _is_loopback(host):
        allowed = "is a network, on which nothing is encrypted and no key is asked for"
        raise SettingError("--coordinator", address, f"{allowed}; add --insecure-network if you trust that network")
    return HostPlace(address, count, own)


def _is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach an address; other names than ``localhost`` may do more."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def devices_of_host(place: HostPlace | None, experiments: Sequence[Experiment]) -> int | None:
    """Returns the number of devices that this host has to emulate; None: as many as the experiments need.

    Raises:
        SettingError: the hosts cannot have equally many, or not for all experiments.
    """
    if place is None:
        return None
    counts = {experiment.topology.num_devices for experiment in experiments}
    if len(counts) > 1:
        allowed = "workers x ranks must be the same in all files of a comparison on several hosts"
        raise SettingError("Topology", sorted(counts), allowed)
    return own_devices(experiments[0].topology, place) if experiments[0].ranks == "emulated" else None


def _check_no_run(options: argparse.Namespace, run_dirs: Iterable[Path]) -> None:
    """Raises SettingError if a run is under way: another host of the same number would end it on all hosts.

    Host 0 takes the directory once all hosts have joined, so before that it has no owner.
    """
    for run_dir in run_dirs:
        found = living_owner(run_dir, lambda line: print(f"swift: {line}", file=sys.stderr, flush=True))
        if found is None:
            continue
        name, value = ("--run-dir", str(run_dir)) if options.host is None else ("--host", options.host)
        allowed = f"the run is under way, by {found.owner or 'another process'}, and all its hosts are there"
        raise SettingError(name, value, allowed)


@contextmanager
def joined(place: HostPlace, options: argparse.Namespace, experiments: Mapping[Path, Experiment]) -> Iterator[Hosts]:
    """Joins the other hosts, before JAX has started; nothing is printed on stdout meanwhile.

    Args:
        place: this host's place among them.
        options: options of the command.
        experiments: what they run, by the directories of the runs.

    Raises:
        SettingError: they cannot be found, or run another program or configuration.
    """
    _check_no_run(options, experiments)
    with options.link.quiet():
        with options.link.joining():
            hosts = join_hosts(place)
        names = [f"{run_dir.name}: " if len(experiments) > 1 else "" for run_dir in experiments]
        facts: dict[str, object] = {"program": this_program(), "experiments": "".join(names)}
        for name in _SAME:
            value = getattr(options, name, None)
            facts[f"--{name.replace('_', '-')}"] = str(value) if isinstance(value, Path) else value
        for words, experiment in zip(names, experiments.values(), strict=True):
            settings = (line.partition(" = ") for line in config_text(experiment).splitlines())
            facts |= {f"{words}{name}": value for name, equals, value in settings if equals}
        hosts.check_same(facts)
        yield hosts
