"""Answers of a run's checkpoints to tasks, as ``swift evaluate`` has kept them with the run, and of several runs."""

from collections.abc import Mapping, Sequence

from swift.evaluate.documents import stored_evaluations
from swift.evaluate.results import Difference, Evaluation, Score, differences
from swift.runlog.reading import Run
from swift.tools.report.sections.parts import Section, Table

_HEADINGS = ("tasks", "task", "score", "iteration", "questions", "correct (%)", "interval of 95 %")


def answers_section(run: Run) -> list[Section]:
    """Makes the section on what a run's checkpoints have answered; none where they were not asked.

    Args:
        run: run to show.

    Raises:
        SettingError: the results are damaged.
    """
    found, rows = stored_evaluations(run.path), []
    for one in found:
        step = "-" if one.step is None else f"{one.step:,}"
        for score in one.scores:
            low, high = score.interval
            counts = f"{score.questions:,}", f"{100 * score.share:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"
            rows.append([one.tasks, score.task, _words(score.metric), step, *counts])
    parts = [f"{one.tasks} of iteration {one.step}" for one in found if not one.is_complete]
    note = f"Not all questions are answered yet: {', '.join(parts)}." if parts else ""
    return [Section("Answers to tasks", tables=[Table(_HEADINGS, rows, 3)], note=note)] if rows else []


def answers_together(runs: Sequence[Run], labels: Sequence[str]) -> list[Section]:
    """Makes the section that compares what several runs have answered; none where fewer than two were asked the same.

    Of each run the newest checkpoint counts that has answered a task file. A difference is taken question by question,
    from the first run that has answered it.

    Args:
        runs: runs of a report.
        labels: label of each.

    Raises:
        SettingError: the results of a run are damaged.
    """
    newest: dict[str, dict[int, Evaluation]] = {}
    for index, run in enumerate(runs):
        for one in sorted(stored_evaluations(run.path), key=lambda one: one.step or 0):
            newest.setdefault(one.tasks_digest, {})[index] = one
    shared = [of_run for of_run in newest.values() if len(of_run) > 1]
    if not shared:
        return []
    asked = sorted({index for of_run in shared for index in of_run})
    rows = [row for of_run in shared for row in _answer_rows(of_run, asked)]
    note = (
        "Correct answers (%) of each run's newest checkpoint that was asked, and in brackets their interval of 95 %; "
        "below, the difference from the first run in points, over the questions that both have answered. Where its "
        "interval leaves 0 out, the two differ."
    )
    partly = [
        f"{labels[index]} on {one.tasks}" for of_run in shared for index, one in of_run.items() if not one.is_complete
    ]
    note += f" Not all questions are answered yet: {', '.join(partly)}." if partly else ""
    headings = ["tasks", "task", "score", *(labels[index] for index in asked)]
    return [Section("Answers to tasks", tables=[Table(headings, rows, 3)], note=note)]


def _answer_rows(of_run: Mapping[int, Evaluation], asked: Sequence[int]) -> list[list[str]]:
    """Makes two rows for each score of a task file: shares, and differences from the first run."""
    first = min(of_run)
    scores = {index: {(one.task, one.metric): one for one in found.scores} for index, found in of_run.items()}
    apart = {
        index: {(one.task, one.metric): one for one in differences(found, of_run[first])}
        for index, found in of_run.items()
        if index != first
    }
    rows = []
    for key in dict.fromkeys(key for of_task in scores.values() for key in of_task):
        named = [of_run[first].tasks, key[0], _words(key[1])]
        rows.append([*named, *(_share_text(scores.get(index, {}).get(key)) for index in asked)])
        rows.append(["", "", "difference", *(_difference_text(apart.get(index, {}).get(key)) for index in asked)])
    return rows


def _share_text(score: Score | None) -> str:
    if score is None:
        return "-"
    low, high = score.interval
    return f"{100 * score.share:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _difference_text(found: Difference | None) -> str:
    if found is None:
        return "-"
    low, high = found.interval
    return f"{100 * found.share:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _words(name: str) -> str:
    return name.replace("_", " ")
