"""The table and the report of a comparison whose runs have ended."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from swift.cli.report import distance_line, report_of
from swift.config.experiment import Experiment
from swift.errors import SettingError, printable
from swift.report.compare import comparison_rows, comparison_table, seed_groups, seed_rows, seeds_terminal_table
from swift.runlog.reading import CONFIG, Run, is_run, read_run


def show_comparison(
    experiments: Mapping[Path, Experiment], top: Path, kind: str, failures: Mapping[str, str] = {}
) -> dict[str, str]:
    """Writes the report of all runs that have a record, and prints the comparison as ``json`` or as text tables.

    Args:
        experiments: experiments by run directory.
        top: directory of the comparison.
        kind: ``json`` or ``text``.
        failures: reasons by name of the runs that have failed.

    Returns:
        ``failures``, and those of the runs whose record is damaged.
    """
    failures, runs = dict(failures), list[Run]()
    for path in filter(is_run, experiments):
        try:
            runs.append(read_run(path))
        except SettingError as error:
            failures.setdefault(path.name, str(error))
    experiments = {run.path: experiments[run.path] for run in runs}
    for name, reason in failures.items():  # before the report, which may fail itself
        print(printable(f"{name}: {reason}"), file=sys.stderr)
    # If ``top`` is itself a run directory, report.html is the name of that run's own report.
    page = top / ("comparison.html" if (top / CONFIG).exists() else "report.html")
    again = " ".join(["swift report", *(str(run.path) for run in runs), f"--out {page}"])
    line = report_of(runs, page, again) if runs else ""
    groups = seed_groups(runs)
    if kind == "json":
        document = {"runs": comparison_rows(runs), "report": str(page) if line else None}
        document |= {"seeds": seed_rows(runs, groups)} if groups else {}
        print(json.dumps(document | ({"failed": failures} if failures else {}), default=asdict))
        return failures
    console = Console()
    console.print(comparison_table(runs))
    if groups:
        console.print(seeds_terminal_table(runs, groups))
    for distance in _distances(list(experiments.values()), runs):
        print(distance)
    print(line)
    return failures


def _distances(experiments: Sequence[Experiment], runs: Sequence[Run]) -> Iterator[str]:
    """Yields a line for each run with failures whose failure-free counterpart also ran, comparing their losses."""
    for experiment, run in zip(experiments, runs, strict=True):
        without_failures = replace(experiment, failures=())
        reference_runs = [
            candidate
            for same, candidate in zip(experiments, runs, strict=True)
            if same == without_failures != experiment
        ]
        if reference_runs:
            yield distance_line(run, reference_runs[0], experiment.topology)
