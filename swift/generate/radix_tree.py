"""A radix tree over tokens: which texts share a beginning, and in which pages its keys and values are.

As in RadixAttention (SGLang, arXiv 2312.07104, section 3): an edge holds a run of tokens, a node splits where texts
part, a node that a request uses is locked, and leaves that nobody uses are evicted, the least recently used first.
A token may be in the tree before its keys and values are computed: whoever is next to need it computes it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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
            equal = _common(child.tokens, text[matched:])
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
        node, held = self.match(text)
        if held == len(text):
            return node, held
        added = Node(text[held:].copy(), pages[held:].copy(), node, max(0, num_computed - held))
        added.last_used = self._clock
        node.children[int(text[held])] = added
        self.num_tokens += len(added.tokens)
        self._list(added)
        return added, held

    def lock(self, node: Node) -> None:
        """Keeps a node and those before it until ``unlock``."""
        for one in node.path:
            self.num_locked += len(one.tokens) if one.num_locks == 0 else 0
            one.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Ends a ``lock``."""
        for one in node.path:
            one.num_locks -= 1
            self.num_locked -= len(one.tokens) if one.num_locks == 0 else 0
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


_EMPTY = np.zeros(0, np.int32)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Number of tokens that two texts begin with alike."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
