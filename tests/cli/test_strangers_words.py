"""Commands as a stranger types them: words of other programs, and files that a report must not replace."""

import pytest

from swift.cli.main import main

WORDS = {
    "extend runs/one": "try `swift train CONFIG.gin --run-dir RUN_DIR --resume --set Experiment.num_steps=N`",
    "resume runs/one": "try `swift train CONFIG.gin --run-dir RUN_DIR --resume`",
    "fork runs/one": "try `swift train CONFIG.gin --init-from RUN_DIR`",
    "train one.gin --steps 5": "--set NAME=VALUE changes a setting, `swift settings` lists them",
    "compare one.gin --lr 1e-3": "--set NAME=VALUE changes a setting, `swift settings` lists them",
    "train one.gin --rundir new": "did you mean --run-dir?",
    "report runs/one --output page.html": "did you mean --out?",
}


@pytest.mark.parametrize("command", WORDS)
def test_a_word_of_another_program_leads_to_ours(command, refusal):
    assert refusal(*command.split()).endswith(f"; {WORDS[command]} (--help lists what is possible)")


def test_an_option_like_no_other_has_no_advice(refusal):
    line = refusal("report", "runs/one", "--format", "json")
    assert line == "unrecognized arguments: --format json (--help lists what is possible)"


@pytest.fixture
def run(tmp_path):
    """A run that has recorded nothing yet."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.gin").write_text("Experiment.num_steps = 3\n")
    (path / "metrics.jsonl").write_text("")
    return path


def test_a_report_replaces_a_page_and_no_other_file(run, capsys):
    """A name that was completed too early, such as that of the metrics, costs a line and not the record."""
    record = run / "metrics.jsonl"
    for page in (run / "page.html", run / "page.html", run / "report.html"):
        assert main(["report", str(run), "--out", str(page)]) == 0
    capsys.readouterr()
    for file in (record, run / "config.gin"):
        content = file.read_bytes()
        assert main(["report", str(run), "--out", str(file)]) == 2
        line = f"swift: --out = '{file}': exists and is not a page of Swift; choose another name\n"
        assert capsys.readouterr().err == line
        assert file.read_bytes() == content


def test_a_page_in_a_directory_that_is_missing_is_refused_before_it_is_drawn(run, monkeypatch, capsys):
    monkeypatch.setattr("swift.cli.report.write_report", None)
    page = run / "nowhere" / "page.html"
    assert main(["report", str(run), "--out", str(page)]) == 2
    line = f"swift: --out = '{page}': cannot be written: there is no directory {page.parent}\n"
    assert capsys.readouterr().err == line


def test_a_link_that_leads_to_itself_costs_a_line(tmp_path, capsys):
    (tmp_path / "loop.gin").symlink_to("loop.gin")
    assert main(["config", str(tmp_path / "loop.gin")]) == 2
    line = f"swift: CONFIG = '{tmp_path / 'loop.gin'}': cannot be read: Too many levels of symbolic links\n"
    assert capsys.readouterr().err == line
