"""The texts at work and the pages of their tokens, which they share where they begin alike.

Nothing is computed here. Pages of a fixed number are handed out, so the memory never exceeds its limit.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift.generate.radix_tree import Node, RadixTree
from swift.generate.request import Answer

_HEADROOM = 64
"""Tokens that every text at work should still find room for when another one is admitted."""


@dataclass(eq=False)
class Draft:
    """A text, waiting or at work.

    Attributes:
        answer: request and answer.
        number: order of arrival.
        tokens: tokens that the model sees, at most its positions.
        table: int32[N], page of each position, for the first ``num_pages``.
        node: node of the tree with which the shared part ends; None: nothing is shared.
        num_shared: tokens of the shared part.
        num_pages: tokens that have a page.
        num_own: tokens after the shared part whose keys and values are computed.
        num_read: tokens that were part of a passage since the text was admitted, or needed none; see ``plan_passages``.
        is_prefilled: whether the text as it was when admitted is computed.
        is_scored: whether the scores of the request's text are there.
    """

    answer: Answer
    number: int
    tokens: list[int]
    table: np.ndarray
    node: Node | None = None
    num_shared: int = 0
    num_pages: int = 0
    num_own: int = 0
    num_read: int = 0
    is_prefilled: bool = False
    is_scored: bool = False

    @property
    def num_computed(self) -> int:
        """Number of the first tokens whose keys and values are computed."""
        computed = 0
        for node in [] if self.node is None else self.node.path:
            computed += node.num_computed
            if node.num_computed < len(node.tokens):
                return computed
        return computed + self.num_own

    def mark_computed(self, end: int) -> None:
        """Notes that the keys and values of the tokens up to ``end`` are computed."""
        begin = 0
        for node in [] if self.node is None else self.node.path:
            node.num_computed = max(node.num_computed, min(len(node.tokens), end - begin))
            begin += len(node.tokens)
        self.num_own = max(self.num_own, end - self.num_shared)

    @property
    def num_wanted(self) -> int:
        """Tokens that are still to be added at most."""
        return self.answer.request.max_tokens - len(self.answer.tokens)


class Drafts:
    """Waiting texts, texts at work, and the pages.

    Args:
        num_pages: pages, S.
        num_columns: columns of a table, N.
        most_at_work: texts at work at most.
        shares: whether texts share what they have in common; without, they are a plain batch.
    """

    def __init__(self, num_pages: int, num_columns: int, most_at_work: int, shares: bool = True):
        self.tree = RadixTree()
        self.at_work: list[Draft] = []
        self._free = list(range(num_pages))
        self._num_columns, self._most_at_work, self._shares = num_columns, most_at_work, shares
        self._waiting: list[tuple[bytes, int, Draft]] = []
        self._last_admitted = b""
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Drafts that wait."""
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def add(self, answer: Answer) -> None:
        """Adds a text to those that wait."""
        self._num_arrived += 1
        tokens, table = [int(token) for token in answer.request.tokens], np.zeros(self._num_columns, np.int32)
        self._wait(Draft(answer, self._num_arrived, tokens, table))

    def admit(self) -> None:
        """Puts texts to work while there is room.

        Waiting texts are taken in the order of their tokens, from the last one taken on and round again. That is depth
        first in their tree: the next text shares as much as any other with those before it (SGLang, theorem 3.1), and
        none waits for ever.
        """
        while self._waiting and len(self.at_work) < self._most_at_work:
            place = bisect_left(self._waiting, (self._last_admitted,)) % len(self._waiting)
            key, _, text = self._waiting[place]
            headroom = sum(min(one.num_wanted, _HEADROOM) for one in [*self.at_work, text]) if self.at_work else 0
            if not self._start(text, self._shares, headroom):
                return
            del self._waiting[place]
            self._last_admitted = key
            self.at_work.append(text)

    def append(self, tokens: Sequence[tuple[Draft, int]], num_positions: int) -> None:
        """Adds a token to each of several texts at work.

        Of a text that fills the model's positions the first token is dropped, and all others are computed anew. Where
        pages are short the texts that came last go back to wait.
        """
        growing = []
        for text, token in tokens:
            if len(text.tokens) == num_positions:
                self._slide(text, token)
            else:
                text.tokens.append(token)
                growing.append(text)
        for text in sorted(growing, key=lambda text: text.number):
            if text in self.at_work:  # and not gone for one before it
                self._give_page(text)

    def finish(self, text: Draft) -> None:
        """Ends the work on a text; what was computed stays until its room is needed."""
        self.at_work.remove(text)
        self._release(text)

    def cancel(self, answer: Answer) -> None:
        """Ends a text, waiting or at work."""
        for text in self.at_work:
            if text.answer is answer:
                self.finish(text)
                return
        self._waiting = [entry for entry in self._waiting if entry[2].answer is not answer]

    def _wait(self, text: Draft) -> None:
        insort(self._waiting, (np.array(text.tokens, ">u4").tobytes(), text.number, text))

    def _start(self, text: Draft, shares: bool, headroom: int) -> bool:
        """Finds pages for a text's tokens; False if that would leave less than the headroom."""
        node, matched = self.tree.match(text.tokens) if shares else (self.tree.root, 0)
        self.tree.lock(node)
        pages = self._take(len(text.tokens) - matched, headroom)
        if pages is not None:
            pages = np.concatenate([*(one.pages for one in node.path), pages])
            text.node, text.num_shared = None, 0
            if shares:
                text.node, text.num_shared = self.tree.insert(text.tokens, pages, 0)[0], len(pages)
                self.tree.lock(text.node)
            text.table[: len(pages)] = pages
            text.num_pages, text.num_own, text.num_read, text.is_prefilled = len(pages), 0, 0, False
        self.tree.unlock(node)
        return pages is not None

    def _slide(self, text: Draft, token: int) -> None:
        tokens = [*text.tokens[1:], token]
        if text.node is None:
            text.tokens, text.num_own, text.num_read, text.is_prefilled = tokens, 0, 0, False
            return
        self._release(text)
        text.tokens = tokens
        if not self._start(text, False, 0):
            self.at_work.remove(text)
            self._wait(text)

    def _give_page(self, text: Draft) -> None:
        while (pages := self._take(1)) is None:
            youngest = max(self.at_work, key=lambda other: other.number)
            self._suspend(youngest)
            if youngest is text:
                return
        text.table[text.num_pages] = pages[0]
        text.num_pages += 1

    def _suspend(self, text: Draft) -> None:
        self.finish(text)
        self._wait(text)

    def _release(self, text: Draft) -> None:
        """Gives the pages of a text back, to the tree where others can share them."""
        first = text.num_shared
        if text.node is not None:
            computed = text.num_computed
            if computed > text.num_shared:
                _, held = self.tree.insert(text.tokens[:computed], text.table[:computed], computed)
                self._free += text.table[first:held].tolist()
                first = computed
            self.tree.unlock(text.node)
        self._free += text.table[first : text.num_pages].tolist()
        text.node, text.num_shared, text.num_pages = None, 0, 0

    def _take(self, count: int, headroom: int = 0) -> np.ndarray | None:
        """Takes pages, evicting what nobody uses; None if that would leave less than the headroom."""
        if count + headroom > len(self._free) + self.tree.num_evictable:
            return None
        if count > len(self._free):
            self._free += self.tree.evict(count - len(self._free)).tolist()
        rest = len(self._free) - count
        taken, self._free = self._free[rest:], self._free[:rest]
        return np.array(taken, np.int32)
