"""The comparison of runs, one of which is damaged."""

import json
from types import SimpleNamespace

import pytest

from swift.cli import comparison
from swift.cli.comparison import show_comparison
from swift.runlog.run_directory import RunDirectory


@pytest.fixture
def experiments(tmp_path):
    """Two runs of three steps; the metrics of the second are damaged."""
    for name in ("good", "bad"):
        with RunDirectory.create(tmp_path / name, "Experiment.num_steps = 3\n") as directory:
            for step in range(1, 4):
                directory.log_step({"step": step, "loss": 4.0, "step_ms": 1.0, "tokens_per_s": 1.0, "tokens": 1})
    with (tmp_path / "bad/metrics.jsonl").open("ab") as file:
        file.write(b"damage\n")
    return {tmp_path / name: SimpleNamespace(failures=()) for name in ("good", "bad")}


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(comparison, "report_of", lambda *_: "the report")
    monkeypatch.setattr(comparison, "_distances", lambda *_: ())


@pytest.mark.usefixtures("plain")
def test_a_damaged_run_does_not_hide_the_others(experiments, tmp_path, capsys):
    failures = show_comparison(experiments, tmp_path, "json", {"third": "is gone"})
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert [run["name"] for run in document["runs"]] == ["good"]
    assert document["failed"] == failures
    assert sorted(failures) == ["bad", "third"]
    assert "metrics.jsonl" in failures["bad"]
    assert told.err == f"third: is gone\nbad: {failures['bad']}\n"


def test_failures_are_told_even_if_the_report_fails(experiments, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(comparison, "report_of", fail)
    with pytest.raises(MemoryError):
        show_comparison(experiments, tmp_path, "text", {"third": "is gone"})
    assert "third: is gone" in capsys.readouterr().err
