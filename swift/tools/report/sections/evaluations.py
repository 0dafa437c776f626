"""Answers of a run's checkpoints to tasks, as ``swift evaluate`` has kept them with the run."""

from swift.runlog import Run
from swift.tools.report.sections.parts import Section, Table

_HEADINGS = ("tasks", "task", "score", "iteration", "questions", "correct (%)", "interval of 95 %")


def evaluations_section(run: Run) -> list[Section]:
    """Makes the section on what a run's checkpoints have answered; none where they were not asked.

    Args:
        run: run to show.

    Raises:
        SettingError: the results are damaged.
    """
    if not (run.path / "evaluations").is_dir():
        return []
    # Imported here, since it loads JAX, which a report on other runs does not need.
    from swift.evaluate import stored_evaluations

    found = stored_evaluations(run.path)
    rows = []
    for one in found:
        step = "-" if one.step is None else f"{one.step:,}"
        for score in one.scores:
            low, high = score.interval
            counts = f"{score.questions:,}", f"{100 * score.share:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"
            rows.append([one.tasks, score.task, score.metric.replace("_", " "), step, *counts])
    parts = [f"{one.tasks} of iteration {one.step}" for one in found if not one.is_complete]
    note = f"Not all questions are answered yet: {', '.join(parts)}." if parts else ""
    return [Section("Answers to tasks", tables=[Table(_HEADINGS, rows, 3)], note=note)] if rows else []
