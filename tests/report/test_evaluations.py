"""Answers of several runs side by side: their shares, and their differences question by question."""

from dataclasses import replace

import pytest

from swift.evaluate.results import Evaluation, Judgement, write_evaluations
from swift.report.figures import sections_of_all
from swift.report.page import write_report


@pytest.fixture
def asked(make_run, tmp_path):
    """Makes a run whose checkpoints have answered a task file, given for each which of its questions are right."""

    def make(name, right_of_step, digest="aa"):
        (tmp_path / name).mkdir()
        run = replace(make_run(name, num_steps=20), path=tmp_path / name)
        for step, right in right_of_step.items():
            judgements = tuple(
                Judgement(line, "sums", {"match": is_right}, text="4") for line, is_right in enumerate(right, start=1)
            )
            told = Evaluation(name, name, step, "bb", "mine", digest, len(right), 1.0, judgements)
            write_evaluations(run.path / "evaluations" / f"mine-{step}.json", [told])
        return run

    return make


def test_the_newest_checkpoints_are_compared_with_the_first_run(asked, tmp_path):
    right = [True] * 30 + [False] * 10
    first = asked("first", {10: [False] * 40, 20: right})
    second = asked("second", {20: [not is_right for is_right in right]})
    section = sections_of_all([first, second])[-1]
    (table,) = section.tables
    assert list(table.headings) == ["tasks", "task", "score", "first", "second"]
    shares, apart = table.rows
    assert shares == ["mine", "sums", "match", "75.0 (59.8 to 85.8)", "25.0 (14.2 to 40.2)"]  # Wilson's, by hand
    assert apart[:4] == ["", "", "difference", "-"]
    assert apart[4].startswith("-50.0 (")
    assert float(apart[4].partition("to ")[2].rstrip(")")) < 0
    write_report([first, second], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count('<section id="answers">') == page.count('href="#answers"') == 1
    assert "75.0 (59.8 to 85.8)" in page.replace("\N{NO-BREAK SPACE}", " ")


def test_runs_that_were_asked_other_questions_are_not_compared(asked):
    first, other = asked("first", {20: [True]}), asked("other", {20: [True]}, digest="cc")
    silent = asked("silent", {})
    assert len(sections_of_all([first, other, silent])) == 2
    assert len(sections_of_all([first])) == 2
    again = asked("again", {20: [False]})
    (table,) = sections_of_all([silent, first, other, again])[-1].tables
    assert list(table.headings[3:]) == ["first", "again"]
