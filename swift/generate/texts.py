"""The waiting and running texts, and the pages of their tokens, which they share where they begin alike.

Nothing is computed here. A fixed number of pages is handed out, so the memory never exceeds its limit. A radix tree
over tokens knows which texts share a beginning, and in which pages its keys and values are, as in RadixAttention
(SGLang, arXiv 2312.07104, section 3): an edge holds a run of tokens, a node splits where texts part, a node that a
request uses is locked, and leaves that nobody uses are evicted, the least recently used first. A token may be in the
tree before its keys and values are computed: whoever is next to need it computes it.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swift.generate.request import Answer

_HEADROOM = 64
"""Tokens that every running text should still find room for when another one is admitted."""
_EMPTY = np.zeros(0, np.int32)


@dataclass(eq=False)
class Node:
    """A run of tokens after those of its parents.

    Attributes:
        tokens: int32, the tokens of the run.
        pages: int32, the page of each.
        parent: node before it; None for the root, which has no tokens, and for a node that was evicted.
        num_computed: tokens of the run, the first ones, whose keys and values are computed.
        children: nodes after it, by their first token.
        num_locks: requests that use it or a node below it.
        last_used: time of its last use, in uses of the tree.
        is_candidate: whether it is in the tree's heap of candidates for eviction.
    """

    tokens: np.ndarray
    pages: np.ndarray
    parent: "Node | None"
    num_computed: int = 0
    children: "dict[int, Node]" = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    is_candidate: bool = False

    @property
    def path(self) -> "list[Node]":
        """The nodes from the first after the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def is_free_leaf(self) -> bool:
        """Whether nobody uses it and no text continues after it."""
        return self.num_locks == 0 and not self.children


class RadixTree:
    """Texts that share the pages of their common beginnings."""

    def __init__(self) -> None:
        self.root = Node(_EMPTY, _EMPTY, None, num_locks=1)
        self.num_tokens = 0
        self.num_locked = 0
        self._clock = 0
        self._candidates: list[tuple[int, int, Node]] = []
        self._num_listed = 0

    @property
    def num_evictable(self) -> int:
        """Tokens whose pages ``evict`` could free."""
        return self.num_tokens - self.num_locked

    def match(self, tokens: Sequence[int] | np.ndarray) -> tuple[Node, int]:
        """Finds the longest beginning of a text that the tree holds.

        The node that the beginning ends in is split there.

        Args:
            tokens: a text.

        Returns:
            (node that the beginning ends with, its number of tokens).
        """
        text = np.asarray(tokens, np.int32)
        self._clock += 1
        node, matched = self.root, 0
        while matched < len(text) and (child := node.children.get(int(text[matched]))) is not None:
            equal = _common_length(child.tokens, text[matched:])
            if equal < len(child.tokens):
                child = self._split(child, equal)
            child.last_used = self._clock
            node, matched = child, matched + equal
        return node, matched

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, num_computed: int) -> tuple[Node, int]:
        """Adds a text; a beginning of it that the tree holds already keeps the pages that it has.

        Args:
            tokens: the text.
            pages: int32, the page of each of its tokens.
            num_computed: its first tokens whose keys and values are in these pages.

        Returns:
            (node that the text ends with, tokens that were held already).
        """
        text = np.asarray(tokens, np.int32)
        node, num_matched = self.match(text)
        if num_matched == len(text):
            return node, num_matched
        added = Node(text[num_matched:].copy(), pages[num_matched:].copy(), node, max(0, num_computed - num_matched))
        added.last_used = self._clock
        node.children[int(text[num_matched])] = added
        self.num_tokens += len(added.tokens)
        self._list(added)
        return added, num_matched

    def lock(self, node: Node) -> None:
        """Keeps a node and those before it until ``unlock``."""
        for path_node in node.path:
            self.num_locked += len(path_node.tokens) if path_node.num_locks == 0 else 0
            path_node.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Ends a ``lock``."""
        for path_node in node.path:
            path_node.num_locks -= 1
            self.num_locked -= len(path_node.tokens) if path_node.num_locks == 0 else 0
        self._list(node)

    def evict(self, num_tokens: int) -> np.ndarray:
        """Removes leaves that nobody uses, the least recently used first; the last of them only as far as needed.

        Args:
            num_tokens: number of pages wanted.

        Returns:
            int32, the freed pages; fewer than wanted if no more can be.
        """
        freed: list[np.ndarray] = []
        missing = num_tokens
        while missing > 0 and self._candidates:
            listed_for, _, node = heapq.heappop(self._candidates)
            node.is_candidate = False
            parent = node.parent
            if parent is None or not node.is_free_leaf:
                continue  # whatever makes it one again lists it again
            if listed_for < node.last_used:
                self._list(node)
                continue
            keep = max(0, len(node.tokens) - missing)
            freed.append(node.pages[keep:])
            missing -= len(node.tokens) - keep
            self.num_tokens -= len(node.tokens) - keep
            if keep:
                node.tokens, node.pages = node.tokens[:keep], node.pages[:keep]
                node.num_computed = min(node.num_computed, keep)
                self._list(node)
            else:
                del parent.children[int(node.tokens[0])]
                node.parent = None
                self._list(parent)
        return np.concatenate(freed) if freed else _EMPTY

    def _list(self, node: Node) -> None:
        """Adds a node to the candidates for eviction, if it is one."""
        if node.is_free_leaf and not node.is_candidate:
            self._num_listed += 1
            node.is_candidate = True
            heapq.heappush(self._candidates, (node.last_used, self._num_listed, node))

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node; the object becomes the lower half, so that those who hold it still hold its end."""
        parent = node.parent
        assert parent is not None, "the root has no tokens"
        upper = Node(node.tokens[:at], node.pages[:at], parent, min(at, node.num_computed))
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[at:], upper
        node.num_computed = max(0, node.num_computed - at)
        upper.children[int(node.tokens[0])] = node
        parent.children[int(upper.tokens[0])] = upper
        return upper


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Number of tokens that two texts begin with alike."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(eq=False)
class TokenSequence:
    """A text, waiting or running.

    Attributes:
        answer: request and answer.
        number: order of arrival.
        tokens: int32, tokens that the model sees, at most its positions.
        allowed: tokens that may come next, bool[V]; None: all.
        table: int32[N], page of each position, for the first ``num_pages``; empty while it waits.
        node: node of the tree with which the shared part ends; None: nothing is shared.
        num_shared: tokens of the shared part.
        num_pages: tokens that have a page.
        num_own: tokens after the shared part whose keys and values are computed.
        num_read: tokens that were part of a passage since it was admitted, or needed none; see ``plan_passages``.
        is_read: whether the text as it was when admitted, or when it last slid, is computed.
        has_slid: whether tokens before those that the model sees were dropped since it was admitted.
        read_order: order in which texts are read.
    """

    answer: Answer
    number: int
    tokens: np.ndarray
    allowed: np.ndarray | None = None
    table: np.ndarray = field(default_factory=lambda: _EMPTY)
    node: Node | None = None
    num_shared: int = 0
    num_pages: int = 0
    num_own: int = 0
    num_read: int = 0
    is_read: bool = False
    has_slid: bool = False
    read_order: int = 0

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
        for node in [] if self.node is None or self.is_read else self.node.path:
            node.num_computed = max(node.num_computed, min(len(node.tokens), end - begin))
            begin += len(node.tokens)
        self.num_own = max(self.num_own, end - self.num_shared)

    @property
    def num_wanted(self) -> int:
        """Tokens that are still to be added at most."""
        return self.answer.request.max_tokens - len(self.answer.tokens)


class SequencePool:
    """Waiting texts, running texts, and the pages.

    Args:
        num_pages: pages, P.
        num_columns: columns of a table, N.
        num_positions: positions of the model.
        most_running: texts that run at a time, at most.
        shares: whether texts share what they have in common; without, they are a plain batch.
    """

    def __init__(self, num_pages: int, num_columns: int, num_positions: int, most_running: int, shares: bool = True):
        self.running: list[TokenSequence] = []
        self._num_pages, self._num_columns, self._num_positions = num_pages, num_columns, num_positions
        self._most_running, self._shares = most_running, shares
        self._waiting: list[tuple[int, bytes, int, TokenSequence]] = []
        self._admitted: tuple[int, bytes] = (0, b"")
        self._num_arrived = self._num_turns = 0
        self.tree, self.free = RadixTree(), list(range(num_pages))

    @property
    def num_waiting(self) -> int:
        """Texts that wait."""
        return len(self._waiting)

    def add(self, answer: Answer, tokens: np.ndarray, allowed: np.ndarray | None) -> None:
        """Adds a text to those that wait."""
        self._num_arrived += 1
        self._wait(TokenSequence(answer, self._num_arrived, tokens, allowed))

    def admit(self) -> None:
        """Puts texts to work while there is room.

        Waiting texts are taken in the order of their tokens, round after round; who comes late, or again, waits for the
        next round. That is depth first in their tree: the next text shares as much as any other with those before it
        (SGLang, theorem 3.1), and none waits forever.
        """
        while self._waiting and len(self.running) < self._most_running:
            number, key, _, draft = self._waiting[0]
            others = [*self.running, draft] if self.running else []
            headroom = sum(_headroom(self._num_positions, other) for other in others)
            if not self._start(draft, self._shares, headroom):
                return
            del self._waiting[0]
            self._admitted = number, key
            self.running.append(draft)

    def append(self, tokens: Sequence[tuple[TokenSequence, int]]) -> None:
        """Adds a token to each of several running texts.

        Of a text that fills the model's positions the first token is dropped, and all others are computed anew. Where
        pages are short the texts that came last go back to wait.
        """
        growing = []
        for draft, token in tokens:
            if len(draft.tokens) == self._num_positions:
                self._slide(draft, token)
            else:
                draft.tokens = np.append(draft.tokens, np.int32(token))
                growing.append(draft)
        pages = self._take(len(growing))
        if pages is not None:
            for draft, page in zip(growing, pages.tolist(), strict=True):
                _give(draft, page)
            return
        for draft in sorted(growing, key=lambda draft: draft.number):
            if draft in self.running:  # and not gone for one before it
                self._make_room(draft)

    def finish(self, draft: TokenSequence) -> None:
        """Ends the work on a text; what was computed stays until its room is needed."""
        self.running.remove(draft)
        self._release(draft)

    def cancel(self, answer: Answer) -> None:
        """Ends a text, waiting or running."""
        for draft in self.running:
            if draft.answer is answer:
                self.finish(draft)
                return
        self._waiting = [entry for entry in self._waiting if entry[3].answer is not answer]

    def forget(self) -> None:
        """Empties all pages; running texts wait again, with the tokens that their answers have."""
        self.tree, self.free = RadixTree(), list(range(self._num_pages))
        for draft in self.running:
            answer = draft.answer
            tokens = [*answer.request.tokens, *answer.tokens]
            if answer.tokens:
                draft.tokens = np.array(tokens[-self._num_positions :], np.int32)
            draft.node, draft.table, draft.num_shared, draft.num_pages = None, _EMPTY, 0, 0
            self._wait(draft)
        self.running = []

    def _wait(self, draft: TokenSequence) -> None:
        number, last = self._admitted
        key = draft.tokens.astype(">u4").tobytes()
        insort(self._waiting, (number if key > last else number + 1, key, draft.number, draft))

    def _start(self, draft: TokenSequence, shares: bool, headroom: int) -> bool:
        """Finds pages for a text's tokens; False if that would leave less than the headroom."""
        node, matched = self.tree.match(draft.tokens) if shares else (self.tree.root, 0)
        self.tree.lock(node)
        pages = self._take(len(draft.tokens) - matched, headroom)
        if pages is not None:
            pages = np.concatenate([*(path_node.pages for path_node in node.path), pages])
            draft.node, draft.num_shared = None, 0
            if shares:
                draft.node, draft.num_shared = self.tree.insert(draft.tokens, pages, 0)[0], len(pages)
                self.tree.lock(draft.node)
            draft.table = np.zeros(self._num_columns, np.int32)
            draft.table[: len(pages)] = pages
            draft.num_pages, draft.has_slid = len(pages), False
            self._begin_to_read(draft)
        self.tree.unlock(node)
        return pages is not None

    def _begin_to_read(self, draft: TokenSequence) -> None:
        self._num_turns += 1
        draft.num_own, draft.num_read, draft.is_read, draft.read_order = 0, 0, False, self._num_turns

    def _slide(self, draft: TokenSequence, token: int) -> None:
        tokens = np.append(draft.tokens[1:], np.int32(token))
        if draft.node is None:
            draft.tokens = tokens
            self._begin_to_read(draft)
        else:
            self._release(draft)
            draft.tokens = tokens
            if not self._start(draft, False, 0):
                self.running.remove(draft)
                self._wait(draft)
                return
        draft.has_slid = True

    def _make_room(self, draft: TokenSequence) -> None:
        while (pages := self._take(1)) is None:
            youngest = max(self.running, key=lambda other: other.number)
            self.finish(youngest)
            self._wait(youngest)
            if youngest is draft:
                return
        _give(draft, int(pages[0]))

    def _release(self, draft: TokenSequence) -> None:
        """Gives the pages of a text back, to the tree where others can share them."""
        first = draft.num_shared
        if draft.node is not None:
            computed = draft.num_computed
            if computed > draft.num_shared:
                _, num_matched = self.tree.insert(draft.tokens[:computed], draft.table[:computed], computed)
                self.free += draft.table[first:num_matched].tolist()
                first = computed
            self.tree.unlock(draft.node)
        self.free += draft.table[first : draft.num_pages].tolist()
        draft.node, draft.table, draft.num_shared, draft.num_pages = None, _EMPTY, 0, 0

    def _take(self, count: int, headroom: int = 0) -> np.ndarray | None:
        """Takes pages, evicting what nobody uses; None if that would leave less than the headroom."""
        if count + headroom > len(self.free) + self.tree.num_evictable:
            return None
        if count > len(self.free):
            self.free += self.tree.evict(count - len(self.free)).tolist()
        rest = len(self.free) - count
        pages = self.free[rest:]
        del self.free[rest:]
        return np.array(pages, np.int32)


def _headroom(num_positions: int, draft: TokenSequence) -> int:
    return min(draft.num_wanted, _HEADROOM, num_positions - len(draft.tokens))


def _give(draft: TokenSequence, page: int) -> None:
    draft.table[draft.num_pages] = page
    draft.num_pages += 1
