"""The runs of tokens of the next call: what is missing of texts that were admitted, or the last token of each.

Legend: R runs, C tokens of a run, N columns of a table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swift.generate.paged_model import Runs
from swift.generate.radix_tree import Node
from swift.generate.texts import Text


@dataclass(eq=False)
class Run:
    """Tokens of a text to be computed together.

    Attributes:
        text: the text.
        first: position of the first token.
        end: position after the last one.
        num_written: how many of the text's first tokens have their keys and values already; they are not written again.
        continued: texts that go on with the token after it.
    """

    text: Text
    first: int
    end: int
    num_written: int
    continued: list[Text] = field(default_factory=list)


def plan_runs(texts: Iterable[Text], most_runs: int, run_length: int) -> list[Run]:
    """Plans what is missing of texts that were admitted.

    What several texts miss is computed for the first of them; they wait for nothing, as a call may read what it writes.
    Texts that are the same share the logits, too. At least the last token of a text is computed for those, and all
    whose successors are scored.

    Args:
        texts: texts at work, the first come first.
        most_runs: runs of a call, R.
        run_length: tokens of a run, C.
    """
    runs: list[Run] = []
    ends: dict[Node, Run] = {}
    for text in texts:
        while not text.is_prefilled:
            run = ends.get(text.node) if text.node is not None and _needed_from(text) == len(text.tokens) - 1 else None
            if run is None and len(runs) == most_runs:
                return runs
            if run is None:
                run = _next_run(text, run_length)
                runs.append(run)
            if run.end == len(text.tokens):
                text.is_prefilled = True
                run.continued.append(text)
                if text.node is not None:
                    ends[text.node] = run
    return runs


def decoding_runs(texts: Iterable[Text]) -> list[Run]:
    """Plans the last token of every text."""
    runs = []
    for text in texts:
        last = len(text.tokens) - 1
        runs.append(Run(text, last, last + 1, last, [text]))
        text.mark_computed(last + 1)
    return runs


def as_arrays(runs: Sequence[Run], num_runs: int, run_length: int, num_columns: int, nowhere: int) -> Runs:
    """Collects runs into arrays of fixed shapes.

    Args:
        runs: at most ``num_runs`` runs.
        num_runs: R.
        run_length: C.
        num_columns: N.
        nowhere: slot of a token whose keys and values are not to be written.
    """
    token_RC, slot_RC, label_RC = (np.full((num_runs, run_length), fill, np.int32) for fill in (0, nowhere, -1))
    first_R, count_R = np.zeros(num_runs, np.int32), np.zeros(num_runs, np.int32)
    table_RN = np.zeros((num_runs, num_columns), np.int32)
    for row, run in enumerate(runs):
        text, count = run.text, run.end - run.first
        first_R[row], count_R[row], table_RN[row] = run.first, count, text.table
        token_RC[row, :count] = text.tokens[run.first : run.end]
        written = max(0, run.num_written - run.first)
        slot_RC[row, written:count] = text.table[run.first + written : run.end]
        begin, end = _scored(run)
        label_RC[row, begin - 1 - run.first : end - 1 - run.first] = text.tokens[begin:end]
    return Runs(token_RC, slot_RC, first_R, count_R, table_RN, label_RC)


def note_scores(run: Run, log_prob_C: np.ndarray, is_likeliest_C: np.ndarray) -> None:
    """Adds the scores of a run to the answer of its text."""
    begin, end = _scored(run)
    answer, columns = run.text.answer, slice(begin - 1 - run.first, end - 1 - run.first)
    answer.text_log_probs = np.concatenate([answer.text_log_probs, log_prob_C[columns]])
    answer.is_likeliest = np.concatenate([answer.is_likeliest, is_likeliest_C[columns]])
    run.text.is_scored = run.text.is_scored or run.end == len(run.text.tokens)


def _scored(run: Run) -> tuple[int, int]:
    """The range of tokens that a run scores: the successors of its own."""
    scored_from = run.text.answer.request.scored_from
    if scored_from is None or run.text.is_scored:
        return run.first + 1, run.first + 1
    begin = max(run.first + 1, scored_from)
    return begin, max(begin, min(run.end + 1, len(run.text.tokens)))


def _needed_from(text: Text) -> int:
    """First token that has to be in a run, even if its keys and values are there."""
    scored_from = text.answer.request.scored_from
    is_wanted = scored_from is not None and not text.is_scored
    return min(len(text.tokens), scored_from if is_wanted else len(text.tokens)) - 1


def _next_run(text: Text, run_length: int) -> Run:
    computed = text.num_computed
    first = max(text.num_run, min(computed, _needed_from(text)))
    run = Run(text, first, min(first + run_length, len(text.tokens)), computed)
    text.mark_computed(run.end)
    text.num_run = run.end
    return run
