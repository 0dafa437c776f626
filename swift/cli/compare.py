"""``swift compare``: runs experiments one after another, each in its own directory, and writes a joint report."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from swift.checkpoint.manifest import committed_steps
from swift.cli.input_hosts import input_hosts_of_runs, plan_reading
from swift.cli.jax_setup import prepare
from swift.cli.run_setup import corpora_directory, new_run_dir, observers_of
from swift.cli.train import devices_of_host, host_settings, joined
from swift.cli.values import OF_ONE, deadlines_of
from swift.config.experiment import Experiment
from swift.config.gin_reader import all_installed, load_experiment
from swift.config.stored import config_text
from swift.data.remote_records import ConnectHosts
from swift.errors import SettingError, printable
from swift.runlog.reading import CONFIG, Run, is_run, read_run
from swift.train.display import Series
from swift.train.hosts import SINGLE_HOST, Hosts
from swift.train.start import TrainOptions, check_resumable, made_directory
from swift.train.trainer import check_before, train
from swift.typed import SourceText


@dataclass(frozen=True)
class _Compared:
    """A run of a comparison.

    Attributes:
        experiment: settings of the run.
        options: training options for this invocation of the command.
        has_ended: whether an earlier invocation completed the run.
    """

    experiment: Experiment
    options: TrainOptions
    has_ended: bool


def compare(options: argparse.Namespace) -> None:
    """Runs ``swift compare CONFIG.gin ...``."""
    configs = all_installed(options.configs)
    names = [path.stem for path in configs]
    if len(set(names)) < len(names):
        raise SettingError("CONFIG", names, "the files need different names, which their runs will have")
    if options.resume and options.run_dir is None:
        allowed = "--resume needs the directory of the comparison to continue"
        raise SettingError("--run-dir", SourceText("(not set)"), allowed)
    experiments = [load_experiment(path, options.set) for path in configs]
    top = options.run_dir or new_run_dir(names[0])
    if options.resume and not any((top / name).exists() for name in names):
        allowed = f"holds no run of this comparison ({', '.join(names)}); leave out --resume to begin it there"
        raise SettingError("--run-dir", str(top), allowed)
    host, data = host_settings(options), [experiment.data for experiment in experiments]
    connect = input_hosts_of_runs(data, options, has_network=host is not None)
    prepare(experiments, devices_of_host(host, experiments))
    run_dirs = {top / name: experiment for name, experiment in zip(names, experiments, strict=True)}
    with nullcontext(SINGLE_HOST) if host is None else joined(host, options, run_dirs) as hosts:
        compared = _found(dict(zip(names, experiments, strict=True)), top, options, hosts, connect)
        with made_directory(top) if hosts.is_first else nullcontext():
            _run(compared, hosts)
    if hosts.is_first:
        _show(experiments, [read_run(entry.options.run_dir) for entry in compared], top, options.format)


def _found(
    experiments: Mapping[str, Experiment],
    top: Path,
    options: argparse.Namespace,
    hosts: Hosts,
    connect: ConnectHosts | None,
) -> list[_Compared]:
    """Determines which runs start, resume, or have ended; the first host checks and tells the other hosts.

    Raises:
        SettingError: a run can neither start nor resume, see ``_standing``.
    """
    stopping_s = deadlines_of(options.deadline, OF_ONE).stopping
    runs = {
        top / name: TrainOptions(
            top / name,
            config_text(experiment),
            log_every=options.log_every,
            observers=observers_of(options),
            stopping_s=stopping_s,
            corpora=corpora_directory(),
            connect=connect,
            plan=plan_reading,
            hosts=hosts,
        )
        for name, experiment in experiments.items()
    }
    standing: list[tuple[bool, bool]] = []
    with hosts.all_or_none():
        if hosts.is_first:
            for experiment, run in zip(experiments.values(), runs.values(), strict=True):
                standing.append(_standing(experiment, run, resume=options.resume))
    return [
        _Compared(experiment, replace(run, resume=is_there), has_ended)
        for experiment, run, (is_there, has_ended) in zip(
            experiments.values(), runs.values(), hosts.broadcast(standing), strict=True
        )
    ]


def _standing(experiment: Experiment, run: TrainOptions, *, resume: bool) -> tuple[bool, bool]:
    """Returns (whether there is a run to continue, whether that run has ended).

    Raises:
        SettingError: the run exists, but ``--resume`` is not set or the run cannot be resumed.
    """
    run_dir = run.run_dir
    if run_dir.exists() and not resume:
        allowed = f"holds {run_dir.name} already; add --resume to continue it, or choose another directory"
        raise SettingError("--run-dir", str(run_dir.parent), allowed)
    if not is_run(run_dir):  # no directory, or only leftovers of an interrupted start, such as a lease
        return False, False
    check_resumable(experiment, run)
    summary = read_run(run_dir, "--run-dir").summary
    has_ended = summary is not None and summary.get("num_steps") == experiment.num_steps
    if not has_ended and not committed_steps(run_dir / "checkpoints"):
        allowed = f"has in {run_dir.name} no checkpoint to resume from; remove that directory to run it again"
        raise SettingError("--resume", str(run_dir.parent), allowed)
    return True, has_ended


def _run(compared: Sequence[_Compared], hosts: Hosts) -> None:
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


def _show(experiments: Sequence[Experiment], runs: Sequence[Run], top: Path, kind: str) -> None:
    """Writes the report of all runs, and prints the comparison as ``json`` or as a text table."""
    from swift.cli.report import report_of
    from swift.report.compare import comparison_rows, comparison_table

    # If ``top`` is itself a run directory, report.html is the name of that run's own report.
    page = top / ("comparison.html" if (top / CONFIG).exists() else "report.html")
    again = " ".join(["swift report", *(str(run.path) for run in runs), f"--out {page}"])
    line = report_of(runs, page, again)
    if kind == "json":
        print(json.dumps({"runs": comparison_rows(runs), "report": str(page) if line else None}))
        return
    Console().print(comparison_table(runs))
    for distance in _distances(experiments, runs):
        print(distance)
    print(line)


def _distances(experiments: Sequence[Experiment], runs: Sequence[Run]) -> Iterator[str]:
    """Yields a line for each run with failures whose failure-free counterpart also ran, comparing their losses."""
    from swift.cli.report import distance_line

    for experiment, run in zip(experiments, runs, strict=True):
        without_failures = replace(experiment, failures=())
        reference_runs = [
            candidate
            for same, candidate in zip(experiments, runs, strict=True)
            if same == without_failures != experiment
        ]
        if reference_runs:
            yield distance_line(run, reference_runs[0], experiment.topology)
