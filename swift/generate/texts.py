"""Scheduler for waiting and running texts, and page allocator for the KV cache, in which texts share common prefixes.

This module only does bookkeeping; ``paged_model`` runs the model. The number of pages is fixed, which limits the
memory. A radix tree over tokens records which texts share a prefix, and which pages hold its keys and values, as in
RadixAttention (SGLang, arXiv 2312.07104, section 3): each node holds a run of tokens and is split where texts diverge.
Nodes that a request uses are locked; unused leaves are evicted, least recently used first. A token may be in the tree
before its keys and values are computed: they are computed for the next text that needs them.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swift.generate.request import Answer

_HEADROOM = 64
"""Number of tokens by which every running text must still be able to grow after another text is admitted."""
_EMPTY = np.zeros(0, np.int32)


@dataclass(eq=False)
class Node:
    """Radix tree node: a run of tokens that follows the parent's run.

    Attributes:
        tokens: int32, tokens of the run.
        pages: int32, page of each token.
        parent: parent node; None for the root, which has no tokens, and for an evicted node.
        num_computed: number of the run's first tokens whose keys and values are computed.
        children: child nodes by their first token.
        num_locks: number of locks on this node or a descendant; a locked node is not evicted.
        last_used: time of the last use, counted in lookups of the tree.
        is_candidate: whether the node is in the tree's heap of candidates for eviction.
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
        """Nodes on the path from the root, which is not included, down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def is_free_leaf(self) -> bool:
        """Whether no request uses the node and it has no children."""
        return self.num_locks == 0 and not self.children


class RadixTree:
    """Radix tree of token sequences, which share the pages for common prefixes."""

    def __init__(self) -> None:
        self.root = Node(_EMPTY, _EMPTY, None, num_locks=1)
        self.num_tokens = 0
        self.num_locked = 0
        self._clock = 0
        self._candidates: list[tuple[int, int, Node]] = []
        self._num_listed = 0

    @property
    def num_evictable(self) -> int:
        """Number of tokens whose pages ``evict`` could free."""
        return self.num_tokens - self.num_locked

    def match(self, tokens: Sequence[int] | np.ndarray) -> tuple[Node, int]:
        """Finds the longest prefix of a text that is in the tree, and splits a node if the prefix ends inside it.

        Args:
            tokens: tokens of the text.

        Returns:
            (node at whose end the prefix ends, number of tokens in the prefix).
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
        """Adds a text; a prefix that is already in the tree keeps its pages.

        Args:
            tokens: tokens of the text.
            pages: int32, page of each token.
            num_computed: number of first tokens whose keys and values are in these pages.

        Returns:
            (node at whose end the text ends, number of tokens that were already in the tree).
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
        """Protects a node and its ancestors from eviction until ``unlock``."""
        for path_node in node.path:
            self.num_locked += len(path_node.tokens) if path_node.num_locks == 0 else 0
            path_node.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Releases one ``lock`` of a node."""
        for path_node in node.path:
            path_node.num_locks -= 1
            self.num_locked -= len(path_node.tokens) if path_node.num_locks == 0 else 0
        self._list(node)

    def evict(self, num_tokens: int) -> np.ndarray:
        """Evicts unused leaves, least recently used first, and of the last one only as many tokens as needed.

        Args:
            num_tokens: number of pages to free.

        Returns:
            int32, the freed pages; fewer than ``num_tokens`` if all other pages are locked.
        """
        freed: list[np.ndarray] = []
        missing = num_tokens
        while missing > 0 and self._candidates:
            listed_for, _, node = heapq.heappop(self._candidates)
            node.is_candidate = False
            parent = node.parent
            if parent is None or not node.is_free_leaf:
                continue  # no longer a free leaf; it is pushed again when it becomes one
            if listed_for < node.last_used:  # used since it was pushed: its key in the heap is out of date
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
        """Pushes a node to the heap of candidates for eviction if it is a free leaf and not in the heap."""
        if node.is_free_leaf and not node.is_candidate:
            self._num_listed += 1
            node.is_candidate = True
            heapq.heappush(self._candidates, (node.last_used, self._num_listed, node))

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node and returns the new upper part; the existing object becomes the lower part.

        A text that refers to the node therefore still refers to the end of its prefix.
        """
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
    """Returns the length of two token arrays' common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(eq=False)
class TokenSequence:
    """State of a text in the scheduler, waiting or running.

    Attributes:
        answer: answer to the text's request.
        number: number of the text in the order of arrival.
        tokens: int32, tokens that the model sees, at most ``sequence_length``.
        allowed: tokens that may come next, bool[V]; None for all.
        table: int32[N], page table: page of each of the first ``num_pages`` positions; empty while the text waits.
        node: tree node at whose end the shared part of the text ends; None if nothing is shared.
        num_shared: number of tokens in the shared part.
        num_pages: number of tokens that have a page.
        num_own: number of tokens after the shared part whose keys and values are computed.
        num_read: number of tokens prefilled since the text was admitted or last slid, including tokens that needed no
            passage; see ``plan_passages``.
        is_read: whether prefill has been completed since the text was admitted or last slid.
        has_slid: whether first tokens were dropped since admission, to stay within the model's positions.
        read_order: number of the text in the order in which texts are prefilled.
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
        """Number of first tokens whose keys and values are computed."""
        computed = 0
        for node in [] if self.node is None else self.node.path:
            computed += node.num_computed
            if node.num_computed < len(node.tokens):
                return computed
        return computed + self.num_own

    def mark_computed(self, end: int) -> None:
        """Records that the keys and values of all tokens before position ``end`` are computed."""
        begin = 0
        for node in [] if self.node is None or self.is_read else self.node.path:
            node.num_computed = max(node.num_computed, min(len(node.tokens), end - begin))
            begin += len(node.tokens)
        self.num_own = max(self.num_own, end - self.num_shared)

    @property
    def num_wanted(self) -> int:
        """Maximum number of tokens that may still be added."""
        return self.answer.request.max_tokens - len(self.answer.tokens)


class SequencePool:
    """Scheduler of waiting and running texts, with the page allocator.

    Args:
        num_pages: number of pages, P.
        num_columns: number of columns of a page table, N.
        num_positions: number of positions of the model.
        most_running: maximum number of texts that run at the same time.
        shares: whether texts share common prefixes.
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
        """Number of waiting texts."""
        return len(self._waiting)

    def add(self, answer: Answer, tokens: np.ndarray, allowed: np.ndarray | None) -> None:
        """Adds a text to the queue."""
        self._num_arrived += 1
        self._wait(TokenSequence(answer, self._num_arrived, tokens, allowed))

    def admit(self) -> None:
        """Starts waiting texts while there is room.

        The queue is sorted by tokens, in rounds: a text that is added or returns after its place in the order has been
        passed waits for the next round. The order is depth-first in the tree of texts, so the next text shares as long
        a prefix with its predecessors as any other text would (SGLang, theorem 3.1), and no text waits forever.
        """
        while self._waiting and len(self.running) < self._most_running:
            number, key, _, sequence = self._waiting[0]
            others = [*self.running, sequence] if self.running else []
            headroom = sum(_headroom(self._num_positions, other) for other in others)
            if not self._start(sequence, self._shares, headroom):
                return
            del self._waiting[0]
            self._admitted = number, key
            self.running.append(sequence)

    def append(self, tokens: Sequence[tuple[TokenSequence, int]]) -> None:
        """Appends a token to each of several running texts.

        A text that fills the model's positions slides: its first token is dropped, and all other tokens are computed
        again. If there are too few pages, the texts that arrived last return to the queue.
        """
        growing = []
        for sequence, token in tokens:
            if len(sequence.tokens) == self._num_positions:
                self._slide(sequence, token)
            else:
                sequence.tokens = np.append(sequence.tokens, np.int32(token))
                growing.append(sequence)
        pages = self._take(len(growing))
        if pages is not None:
            for sequence, page in zip(growing, pages.tolist(), strict=True):
                _give(sequence, page)
            return
        for sequence in sorted(growing, key=lambda sequence: sequence.number):
            if sequence in self.running:  # it may have been preempted for an earlier text
                self._make_room(sequence)

    def finish(self, sequence: TokenSequence) -> None:
        """Ends a running text; if texts share prefixes, its keys and values stay in the tree until they are evicted."""
        self.running.remove(sequence)
        self._release(sequence)

    def cancel(self, answer: Answer) -> None:
        """Removes the text of an answer, whether it is waiting or running."""
        for sequence in self.running:
            if sequence.answer is answer:
                self.finish(sequence)
                return
        self._waiting = [entry for entry in self._waiting if entry[3].answer is not answer]

    def forget(self) -> None:
        """Discards the whole KV cache; running texts return to the queue with the tokens of their answers so far."""
        self.tree, self.free = RadixTree(), list(range(self._num_pages))
        for sequence in self.running:
            answer = sequence.answer
            tokens = [*answer.request.tokens, *answer.tokens]
            if answer.tokens:
                sequence.tokens = np.array(tokens[-self._num_positions :], np.int32)
            sequence.node, sequence.table, sequence.num_shared, sequence.num_pages = None, _EMPTY, 0, 0
            self._wait(sequence)
        self.running = []

    def _wait(self, sequence: TokenSequence) -> None:
        number, last = self._admitted
        key = sequence.tokens.astype(">u4").tobytes()
        insort(self._waiting, (number if key > last else number + 1, key, sequence.number, sequence))

    def _start(self, sequence: TokenSequence, shares: bool, headroom: int) -> bool:
        """Allocates pages for a text's tokens, or returns False if fewer than ``headroom`` pages would be left."""
        node, matched = self.tree.match(sequence.tokens) if shares else (self.tree.root, 0)
        self.tree.lock(node)
        pages = self._take(len(sequence.tokens) - matched, headroom)
        if pages is not None:
            pages = np.concatenate([*(path_node.pages for path_node in node.path), pages])
            sequence.node, sequence.num_shared = None, 0
            if shares:
                sequence.node, sequence.num_shared = self.tree.insert(sequence.tokens, pages, 0)[0], len(pages)
                self.tree.lock(sequence.node)
            sequence.table = np.zeros(self._num_columns, np.int32)
            sequence.table[: len(pages)] = pages
            sequence.num_pages, sequence.has_slid = len(pages), False
            self._begin_to_read(sequence)
        self.tree.unlock(node)
        return pages is not None

    def _begin_to_read(self, sequence: TokenSequence) -> None:
        self._num_turns += 1
        sequence.num_own, sequence.num_read, sequence.is_read, sequence.read_order = 0, 0, False, self._num_turns

    def _slide(self, sequence: TokenSequence, token: int) -> None:
        tokens = np.append(sequence.tokens[1:], np.int32(token))
        if sequence.node is None:
            sequence.tokens = tokens
            self._begin_to_read(sequence)
        else:
            self._release(sequence)
            sequence.tokens = tokens
            if not self._start(sequence, False, 0):
                self.running.remove(sequence)
                self._wait(sequence)
                return
        sequence.has_slid = True

    def _make_room(self, sequence: TokenSequence) -> None:
        while (pages := self._take(1)) is None:
            youngest = max(self.running, key=lambda other: other.number)
            self.finish(youngest)
            self._wait(youngest)
            if youngest is sequence:
                return
        _give(sequence, int(pages[0]))

    def _release(self, sequence: TokenSequence) -> None:
        """Releases a text's pages: if texts share prefixes, computed tokens stay in the tree; others become free."""
        first = sequence.num_shared
        if sequence.node is not None:
            computed = sequence.num_computed
            if computed > sequence.num_shared:
                _, num_matched = self.tree.insert(sequence.tokens[:computed], sequence.table[:computed], computed)
                self.free += sequence.table[first:num_matched].tolist()
                first = computed
            self.tree.unlock(sequence.node)
        self.free += sequence.table[first : sequence.num_pages].tolist()
        sequence.node, sequence.table, sequence.num_shared, sequence.num_pages = None, _EMPTY, 0, 0

    def _take(self, count: int, headroom: int = 0) -> np.ndarray | None:
        """Allocates pages, evicting unused ones if needed; returns None if fewer than ``headroom`` would be left."""
        if count + headroom > len(self.free) + self.tree.num_evictable:
            return None
        if count > len(self.free):
            self.free += self.tree.evict(count - len(self.free)).tolist()
        rest = len(self.free) - count
        pages = self.free[rest:]
        del self.free[rest:]
        return np.array(pages, np.int32)


def _headroom(num_positions: int, sequence: TokenSequence) -> int:
    return min(sequence.num_wanted, _HEADROOM, num_positions - len(sequence.tokens))


def _give(sequence: TokenSequence, page: int) -> None:
    sequence.table[sequence.num_pages] = page
    sequence.num_pages += 1
