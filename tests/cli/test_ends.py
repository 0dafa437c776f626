"""The end of a run on the command line, without a model: its report, and its distance from another run."""

import json

import pytest

from swift.cli.report import distance_line, report_of, show_run
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.topology import Topology


@pytest.fixture
def recorded(tmp_path):
    """Makes a run of some steps."""

    def make(name, steps):
        with RunDirectory.create(tmp_path / name, "") as directory:
            for step in steps:
                directory.log_step({"step": step, "loss": 4.0 / step, "live_workers": 4, "live_ranks": 1})
        return read_run(tmp_path / name)

    return make


def test_a_run_has_succeeded_though_its_report_cannot_be_written(recorded, capsys):
    run = recorded("run", [1, 2])
    (run.path / "report.html").mkdir()
    show_run(run, {"final_loss": 2.0}, "json")
    told = capsys.readouterr()
    assert json.loads(told.out) == {"final_loss": 2.0}
    assert told.err == (
        f"report = '{run.path}/report.html': is a directory, not a file; "
        f"`swift report {run.path}` with another --out FILE writes it elsewhere\n"
    )


def test_runs_have_been_compared_though_their_report_cannot_be_written(recorded, tmp_path, capsys):
    runs, page = [recorded("one", [1]), recorded("other", [1])], tmp_path / "none" / "report.html"
    again = f"swift report {runs[0].path} {runs[1].path} --out {page}"
    assert report_of(runs, page, again) == ""
    assert capsys.readouterr().err == (
        f"report = '{page}': cannot be written: there is no directory {page.parent}; "
        f"`{again}` with another --out FILE writes it elsewhere\n"
    )
    page.parent.mkdir()
    assert report_of(runs, page, again) == f"report: {page}"
    assert page.exists()


def test_runs_without_a_common_iteration_are_not_compared(recorded):
    runs = recorded("one", [1, 2]), recorded("other", [3, 4])
    line = distance_line(*runs, Topology(2, 2, 1))
    assert line == "one and other have no iteration in common, by which their losses could be compared"
    assert distance_line(runs[0], runs[0], Topology(2, 2, 1)).startswith("one: with 4 of 4 workers at the least")
