"""Tables of scores, for a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from swift.errors import printable
from swift.evaluate import Difference, Evaluation, Score, differences


def scores_tables(evaluations: Sequence[Evaluation]) -> Iterator[Table]:
    """Makes the table of scores, a column for each model, and that of the differences from the first model.

    Args:
        evaluations: results of one task file.
    """
    first, *others = evaluations
    scores = [{(score.task, score.metric): score for score in one.scores} for one in evaluations]
    table = _table(["task", "score", "questions", *(one.model for one in evaluations)])
    for key, score in scores[0].items():
        shares = [_share(found[key]) if key in found else "-" for found in scores]
        _add(table, [*key, f"{score.questions:,}", *shares])
    yield table
    if others:
        table = _table(["task", "score", *(f"{one.model} less {first.model}" for one in others)])
        pairs = [{(found.task, found.metric): found for found in differences(one, first)} for one in others]
        for key in scores[0]:
            _add(table, [*key, *(_share(found[key], "+") if key in found else "-" for found in pairs)])
        yield table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("task", "score") else "right", overflow="fold")
    return table


def _add(table: Table, cells: Sequence[str]) -> None:
    table.add_row(*(Text(printable(cell)) for cell in cells))


def _share(found: Score | Difference, sign: str = "") -> str:
    """Formats a share in percent, with its interval of 95 %."""
    low, high = found.interval
    return f"{100 * found.share:{sign}.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
