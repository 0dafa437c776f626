"""Tables of scores, for a terminal."""

from collections.abc import Iterator, Sequence

from swift.evaluate.results import Difference, Evaluation, Score, differences
from swift.terminal_table import TerminalTable

_TEXTS = ("task", "score")


def scores_tables(evaluations: Sequence[Evaluation]) -> Iterator[TerminalTable]:
    """Makes the table of scores, a column for each model, and that of the differences from the first model.

    Args:
        evaluations: results of one task file.
    """
    first, *others = evaluations
    scores = [{(score.task, score.metric): score for score in one.scores} for one in evaluations]
    table = TerminalTable([*_TEXTS, "questions", *(one.model for one in evaluations)], _TEXTS)
    for key, score in scores[0].items():
        shares = [_share(found[key]) if key in found else "-" for found in scores]
        table.add_row(*key, f"{score.questions:,}", *shares)
    yield table
    if others:
        table = TerminalTable([*_TEXTS, *(f"{one.model} less {first.model}" for one in others)], _TEXTS)
        pairs = [{(found.task, found.metric): found for found in differences(one, first)} for one in others]
        for key in scores[0]:
            table.add_row(*key, *(_share(found[key], "+") if key in found else "-" for found in pairs))
        yield table


def _share(found: Score | Difference, sign: str = "") -> str:
    """Formats a share in percent, with its interval of 95 %."""
    low, high = found.interval
    return f"{100 * found.share:{sign}.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
