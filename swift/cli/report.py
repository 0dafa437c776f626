"""``swift report``: writes an HTML page on one or more runs; also prints the results of runs that just ended.

Commands that run an experiment import this module only at the end of the run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from swift.cli.values import PAGE, check_output
from swift.errors import SettingError, printable
from swift.report.compare import comparison_table
from swift.report.page import write_report
from swift.runlog.reading import Run, read_run, scalars
from swift.topology import Topology


def report(options: argparse.Namespace) -> None:
    """Runs ``swift report RUN_DIR ...``."""
    runs = [read_run(path) for path in options.run_dirs]
    page = options.out or options.run_dirs[0] / "report.html"
    check_output("--out", page, PAGE)
    try:
        write_report(runs, page)
    except OSError as error:
        raise SettingError("--out", str(page), f"cannot be written: {error.strerror}") from error
    print(printable(str(page)))


def show_run(run: Run, summary: dict[str, Any], kind: str) -> None:
    """Writes the report of a run that has ended, and prints its result: the summary as JSON, or a table.

    Args:
        run: the run.
        summary: entries of the JSON document.
        kind: ``json``, or ``text`` for a table.
    """
    page = run.path / "report.html"
    line = report_of([run], page, again=f"swift report {run.path}")
    if kind == "json":
        print(json.dumps(summary))
    else:
        Console().print(comparison_table([run]))
        print(line)


def report_of(runs: Sequence[Run], page: Path, again: str) -> str:
    """Writes the report of runs that have ended; only prints an error, since the runs themselves have succeeded.

    Args:
        runs: runs to show.
        page: path of the report.
        again: command that can write the report later, for the error message.

    Returns:
        A line with the path of the report, or an empty string if it could not be written.
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


def show_distance(run: Run, other: Run, topology: Topology, kind: str) -> None:
    """Prints the line of ``distance_line``; on stderr if stdout has JSON."""
    print(distance_line(run, other, topology), file=sys.stderr if kind == "json" else sys.stdout)


def distance_line(run: Run, other: Run, topology: Topology) -> str:
    """Formats a line that compares the losses in a run with failures to those in a run without.

    Args:
        run: run that lost workers or ranks.
        other: run of the same experiment without failures.
        topology: topology of both runs.
    """
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
