"""The radix tree, against a plain set of beginnings."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.generate.texts import RadixTree


def pages_of(node):
    return np.concatenate([one.pages for one in node.path]).tolist() if node.path else []


def tokens_of(node):
    return np.concatenate([one.tokens for one in node.path]).tolist() if node.path else []


texts = st.lists(st.integers(0, 2), max_size=7)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), texts),
        st.tuples(st.just("match"), texts),
        st.tuples(st.just("lock"), texts),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 12)),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(actions)
def test_it_holds_what_was_inserted_and_not_evicted(steps):
    tree, page_of, locks, next_page = RadixTree(), {}, [], 0
    for action, value in steps:
        if action == "insert":
            unknown = (end for end in range(len(value)) if tuple(value[: end + 1]) not in page_of)
            expected = next(unknown, len(value))
            pages = np.arange(next_page, next_page + len(value), dtype=np.int32)
            node, held = tree.insert(value, pages, len(value))
            pages[:] = -1  # the tree has its own copy
            next_page += len(value)
            assert held == expected
            for end in range(held, len(value)):
                page_of[tuple(value[: end + 1])] = next_page - len(value) + end
            assert tokens_of(node) == value
        elif action in ("match", "lock"):
            node, matched = tree.match(value)
            held = [tuple(value[: end + 1]) in page_of for end in range(len(value))]
            assert matched == (held.index(False) if False in held else len(value))
            assert tokens_of(node) == value[:matched]
            assert pages_of(node) == [page_of[tuple(value[: end + 1])] for end in range(matched)]
            if action == "lock":
                tree.lock(node)
                locks.append((node, value[:matched]))
        elif action == "unlock" and locks:
            tree.unlock(locks.pop(value % len(locks))[0])
        elif action == "evict":
            kept = {tuple(text[: end + 1]) for _, text in locks for end in range(len(text))}
            evictable = len(page_of) - len(kept)
            assert tree.num_evictable == evictable
            freed = set(tree.evict(value).tolist())
            assert len(freed) == min(value, evictable)
            page_of = {text: page for text, page in page_of.items() if page not in freed}
            assert kept <= page_of.keys()
            assert all(text[:-1] in page_of for text in page_of if len(text) > 1)
        for node, text in locks:
            assert tokens_of(node) == text
    assert tree.num_tokens == len(page_of)


def test_what_was_used_last_is_evicted_last():
    tree = RadixTree()
    for number, text in enumerate(([1, 2, 3], [4, 5, 6], [1, 2, 9])):
        tree.insert(text, np.arange(3, dtype=np.int32) + 10 * number, 3)
    tree.match([4, 5])
    assert tree.evict(1).tolist() == [2]  # of the first text, whose beginning the third shares
    assert tree.evict(3).tolist() == [12, 22, 1]  # the end that was not matched, the third text, then from behind
    assert tree.match([4, 5, 6])[1] == 2


def test_a_computed_part_stays_computed_when_a_node_splits():
    tree = RadixTree()
    node, _ = tree.insert([1, 2, 3, 4], np.arange(4, dtype=np.int32), 3)
    upper, _ = tree.match([1, 2])
    assert (upper.num_computed, node.num_computed, node.parent) == (2, 1, upper)
