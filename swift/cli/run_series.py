"""Runs of a comparison one after another in this process, or in one process on each host."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from swift.cli.input_hosts import input_hosts_of_runs, plan_reading
from swift.cli.jax_setup import prepare
from swift.cli.run_setup import corpora_directory, observers_of
from swift.cli.standing import Standing, standing_of
from swift.cli.train import devices_of_host, host_settings, joined
from swift.cli.values import OF_ONE, deadlines_of
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.data.remote_records import ConnectHosts
from swift.errors import SettingError, printable
from swift.train.display import Series
from swift.train.hosts import SINGLE_HOST, Hosts
from swift.train.start import TrainOptions, made_directory
from swift.train.trainer import check_before, train


@dataclass(frozen=True)
class _SeriesRun:
    """A run of a series.

    Attributes:
        experiment: settings of the run.
        options: training options for this invocation of the command.
        has_ended: whether an earlier invocation completed the run.
    """

    experiment: Experiment
    options: TrainOptions
    has_ended: bool


def run_series(experiments: Mapping[Path, Experiment], options: argparse.Namespace) -> bool:
    """Runs all experiments that have not ended yet.

    Args:
        experiments: experiments by run directory; all directories have the same parent.
        options: options of the command.

    Returns:
        Whether this is the first host, which shows the comparison.
    """
    host, data = host_settings(options), [experiment.data for experiment in experiments.values()]
    connect = input_hosts_of_runs(data, options, has_network=host is not None)
    prepare(list(experiments.values()), devices_of_host(host, list(experiments.values())))
    with nullcontext(SINGLE_HOST) if host is None else joined(host, options, experiments) as hosts:
        compared = _found(experiments, options, hosts, connect)
        with made_directory(next(iter(experiments)).parent) if hosts.is_first else nullcontext():
            _run(compared, hosts)
    return hosts.is_first


def _found(
    experiments: Mapping[Path, Experiment],
    options: argparse.Namespace,
    hosts: Hosts,
    connect: ConnectHosts | None,
) -> list[_SeriesRun]:
    """Determines which runs start, resume, or have ended; the first host checks and tells the other hosts.

    Raises:
        SettingError: a run can neither start nor resume, see ``_standing``.
    """
    stopping_s = deadlines_of(options.deadline, OF_ONE).stopping
    runs = {
        run_dir: TrainOptions(
            run_dir,
            config_text(experiment),
            log_every=options.log_every,
            observers=observers_of(options),
            stopping_s=stopping_s,
            corpora=corpora_directory(),
            connect=connect,
            plan=plan_reading,
            hosts=hosts,
        )
        for run_dir, experiment in experiments.items()
    }
    standing: list[Standing] = []
    with hosts.all_or_none():
        if hosts.is_first:
            standing = [_standing(experiment, path, options) for path, experiment in experiments.items()]
    return [
        _SeriesRun(experiment, replace(run, resume=state != "new"), state == "ended")
        for experiment, run, state in zip(experiments.values(), runs.values(), hosts.broadcast(standing), strict=True)
    ]


def _standing(experiment: Experiment, run_dir: Path, options: argparse.Namespace) -> Standing:
    """Returns the standing of a run; raises SettingError for a run without a checkpoint to resume from."""
    state = standing_of(experiment, run_dir, resume=options.resume)
    if state == "unsaved":
        allowed = f"has in {run_dir.name} no checkpoint to resume from; remove that directory to run it again"
        raise SettingError("--resume", str(run_dir.parent), allowed)
    return state


def _run(compared: Sequence[_SeriesRun], hosts: Hosts) -> None:
    with hosts.all_or_none():  # check all runs first, so that a mistake in the last is reported before the first starts
        remaining = [entry for entry in compared if not entry.has_ended]
        data = {
            f"{entry.options.run_dir.name}: the data": check_before(entry.experiment, entry.options)
            for entry in remaining
        }
    hosts.check_same(data)
    steps = [0 if entry.has_ended else entry.experiment.num_steps for entry in compared]
    for number, entry in enumerate(compared, 1):
        if not entry.has_ended:
            series = Series(number, len(compared), steps_after=sum(steps[number:]))
            train(entry.experiment, replace(entry.options, series=series))
        elif hosts.is_first:
            print(
                f"{printable(entry.options.run_dir.name)} ({number} of {len(compared)}): has ended already",
                file=sys.stderr,
            )
    if not any(steps):
        hosts.separate()
