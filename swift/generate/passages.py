"""The passages of the next call: what is missing of texts that were admitted, or the last token of each.

Legend: R passages, C tokens of a passage, N columns of a table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swift.generate.drafts import Draft
from swift.generate.paged_model import Passages
from swift.generate.radix_tree import Node


@dataclass(eq=False)
class Passage:
    """Tokens of a text to be computed together.

    Attributes:
        draft: the text.
        first: position of the first token.
        end: position after the last one.
        num_written: how many of the text's first tokens have their keys and values already; they are not written again.
        scored: range of the text's tokens, as the request has it, that are scored: successors of those of the passage.
        continued: texts that continue with the token after it.
    """

    draft: Draft
    first: int
    end: int
    num_written: int
    scored: range = range(0)
    continued: list[Draft] = field(default_factory=list)


def plan_passages(drafts: Iterable[Draft], most_passages: int, passage_length: int) -> list[Passage]:
    """Plans what is missing of texts that were admitted.

    What several texts miss is computed for the first of them; they wait for nothing, as a call may read what it writes.
    Texts that are the same share the logits, too. At least the last token of a text is computed for those, and all
    whose successors are scored.

    Args:
        drafts: running texts, in the order in which they are read.
        most_passages: passages of a call, R.
        passage_length: tokens of a passage, C.
    """
    passages: list[Passage] = []
    ends: dict[Node, Passage] = {}
    for draft in drafts:
        while not draft.is_read:
            same = None if draft.node is None or _unscored(draft) else ends.get(draft.node)
            if same is None and len(passages) == most_passages:
                return passages
            passage = same or _next_passage(draft, passage_length)
            if same is None:
                passages.append(passage)
            if passage.end == len(draft.tokens):
                draft.is_read = True
                passage.continued.append(draft)
                if draft.node is not None:
                    ends[draft.node] = passage
    return passages


def decoding_passages(drafts: Iterable[Draft]) -> list[Passage]:
    """Plans the last token of every text."""
    passages = []
    for draft in drafts:
        last = len(draft.tokens) - 1
        passages.append(Passage(draft, last, last + 1, last, continued=[draft]))
        draft.mark_computed(last + 1)
    return passages


def as_arrays(
    passages: Sequence[Passage], num_passages: int, passage_length: int, num_columns: int, nowhere: int
) -> Passages:
    """Collects passages into NumPy arrays of fixed shapes, which the call of the model puts on its devices.

    Args:
        passages: at most ``num_passages`` passages.
        num_passages: R.
        passage_length: C.
        num_columns: N.
        nowhere: page of a token whose keys and values are not to be written.
    """
    token_RC, page_RC, label_RC = (np.full((num_passages, passage_length), fill, np.int32) for fill in (0, nowhere, -1))
    first_R, count_R = np.zeros(num_passages, np.int32), np.zeros(num_passages, np.int32)
    table_RN = np.zeros((num_passages, num_columns), np.int32)
    for row, passage in enumerate(passages):
        draft, first, count = passage.draft, passage.first, passage.end - passage.first
        first_R[row], count_R[row], table_RN[row] = first, count, draft.table
        token_RC[row, :count] = draft.tokens[first : passage.end]
        written = max(0, passage.num_written - first)
        page_RC[row, written:count] = draft.table[first + written : passage.end]
        scored = passage.scored
        if scored:
            label_RC[row, _columns(passage)] = draft.answer.request.tokens[scored.start : scored.stop]
    return Passages(token_RC, page_RC, first_R, count_R, table_RN, label_RC)  # type: ignore[arg-type]


def note_scores(passage: Passage, log_prob_C: np.ndarray, is_likeliest_C: np.ndarray) -> None:
    """Adds the scores of a passage to the answer of its text."""
    answer, columns = passage.draft.answer, _columns(passage)
    answer.text_log_probs = np.concatenate([answer.text_log_probs, log_prob_C[columns]])
    answer.is_likeliest = np.concatenate([answer.is_likeliest, is_likeliest_C[columns]])


def _columns(passage: Passage) -> slice:
    """The tokens of a passage whose successors are scored."""
    return slice(passage.scored.start - 1 - passage.first, passage.scored.stop - 1 - passage.first)


def _unscored(draft: Draft) -> range:
    """The tokens of the request's text that are still to be scored."""
    request = draft.answer.request
    if request.scored_from is None:
        return range(0)
    return range(request.scored_from + len(draft.answer.text_log_probs), len(request.tokens))


def _next_passage(draft: Draft, passage_length: int) -> Passage:
    computed, unscored = draft.num_computed, _unscored(draft)
    needed_from = min(len(draft.tokens), unscored.start if unscored else len(draft.tokens)) - 1
    first = max(draft.num_read, min(computed, needed_from))
    end = min(first + passage_length, len(draft.tokens))
    begin = max(first + 1, unscored.start)
    scored = range(begin, max(begin, min(end + 1, unscored.stop))) if unscored else range(0)
    draft.mark_computed(end)
    draft.num_read = end
    return Passage(draft, first, end, computed, scored)
