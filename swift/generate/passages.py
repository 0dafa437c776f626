"""The passages of tokens of the next call: what is missing of texts that were admitted, or the last token of each.

Legend: R passages, C tokens of a passage, N columns of a table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from swift.generate.drafts import Draft
from swift.generate.paged_model import Passages
from swift.generate.radix_tree import Node


@dataclass(eq=False)
class Passage:
    """Tokens of a text to be computed together.

    Attributes:
        text: the text.
        first: position of the first token.
        end: position after the last one.
        num_written: how many of the text's first tokens have their keys and values already; they are not written again.
        continued: texts that go on with the token after it.
    """

    text: Draft
    first: int
    end: int
    num_written: int
    continued: list[Draft] = field(default_factory=list)


def plan_passages(texts: Iterable[Draft], most_passages: int, passage_length: int) -> list[Passage]:
    """Plans what is missing of texts that were admitted.

    What several texts miss is computed for the first of them; they wait for nothing, as a call may read what it writes.
    Drafts that are the same share the logits, too. At least the last token of a text is computed for those, and all
    whose successors are scored.

    Args:
        texts: texts at work, the first come first.
        most_passages: passages of a call, R.
        passage_length: tokens of a passage, C.
    """
    passages: list[Passage] = []
    ends: dict[Node, Passage] = {}
    for text in texts:
        while not text.is_prefilled:
            passage = (
                ends.get(text.node) if text.node is not None and _needed_from(text) == len(text.tokens) - 1 else None
            )
            if passage is None and len(passages) == most_passages:
                return passages
            if passage is None:
                passage = _next_passage(text, passage_length)
                passages.append(passage)
            if passage.end == len(text.tokens):
                text.is_prefilled = True
                passage.continued.append(text)
                if text.node is not None:
                    ends[text.node] = passage
    return passages


def decoding_passages(texts: Iterable[Draft]) -> list[Passage]:
    """Plans the last token of every text."""
    passages = []
    for text in texts:
        last = len(text.tokens) - 1
        passages.append(Passage(text, last, last + 1, last, [text]))
        text.mark_computed(last + 1)
    return passages


def as_arrays(
    passages: Sequence[Passage], num_passages: int, passage_length: int, num_columns: int, nowhere: int
) -> Passages:
    """Collects passages into arrays of fixed shapes.

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
        text, count = passage.text, passage.end - passage.first
        first_R[row], count_R[row], table_RN[row] = passage.first, count, text.table
        token_RC[row, :count] = text.tokens[passage.first : passage.end]
        written = max(0, passage.num_written - passage.first)
        page_RC[row, written:count] = text.table[passage.first + written : passage.end]
        begin, end = _scored(passage)
        label_RC[row, begin - 1 - passage.first : end - 1 - passage.first] = text.tokens[begin:end]
    return Passages(*map(jnp.asarray, (token_RC, page_RC, first_R, count_R, table_RN, label_RC)))


def note_scores(passage: Passage, log_prob_C: np.ndarray, is_likeliest_C: np.ndarray) -> None:
    """Adds the scores of a passage to the answer of its text."""
    begin, end = _scored(passage)
    answer, columns = passage.text.answer, slice(begin - 1 - passage.first, end - 1 - passage.first)
    answer.text_log_probs = np.concatenate([answer.text_log_probs, log_prob_C[columns]])
    answer.is_likeliest = np.concatenate([answer.is_likeliest, is_likeliest_C[columns]])
    passage.text.is_scored = passage.text.is_scored or passage.end == len(passage.text.tokens)


def _scored(passage: Passage) -> tuple[int, int]:
    """The range of tokens that a passage scores: the successors of its own."""
    scored_from = passage.text.answer.request.scored_from
    if scored_from is None or passage.text.is_scored:
        return passage.first + 1, passage.first + 1
    begin = max(passage.first + 1, scored_from)
    return begin, max(begin, min(passage.end + 1, len(passage.text.tokens)))


def _needed_from(text: Draft) -> int:
    """First token that has to be in a passage, even if its keys and values are there."""
    scored_from = text.answer.request.scored_from
    if scored_from is None or text.is_scored:
        return len(text.tokens) - 1
    return min(len(text.tokens), scored_from) - 1


def _next_passage(text: Draft, passage_length: int) -> Passage:
    computed = text.num_computed
    first = max(text.num_read, min(computed, _needed_from(text)))
    passage = Passage(text, first, min(first + passage_length, len(text.tokens)), computed)
    text.mark_computed(passage.end)
    text.num_read = passage.end
    return passage
