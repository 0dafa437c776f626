"""The public tests of sglang-jax's radix cache, for our tree: behaviour by behaviour, through an adapter.

Names follow those of its ``test_radix_cache.py`` (wheel 0.0.1.post1, and the repository for what the wheel has not). Of
what it tests we have no pages of several tokens, no name spaces of a cache (an engine has one model), no events and no
printed tree.
"""

import numpy as np
import pytest

from swift.generate.engine import TextEngineConfig
from swift.generate.request import Answer, Request
from swift.generate.texts import RadixTree, SequencePool


class Cache:
    """A radix tree with the calls of sglang-jax's cache; the page of a token without one is the token itself."""

    def __init__(self):
        self.tree = RadixTree()

    def insert(self, key, value=None):
        """Adds a text; returns how much of it was there."""
        return self.tree.insert(key, np.array(key if value is None else value, np.int32), len(key))[1]

    def match(self, key):
        """(pages of the longest beginning, the node that it ends with)."""
        node, length = self.tree.match(key)
        pages = np.concatenate([one.pages for one in node.path]) if node.path else node.pages
        assert len(pages) == length
        return pages, node

    @property
    def sizes(self):
        """Tokens that can be evicted, that cannot, and all."""
        return self.tree.num_evictable, self.tree.num_locked, self.tree.num_tokens


@pytest.fixture
def cache():
    return Cache()


def test_init(cache):
    assert cache.tree.root.num_locks == 1
    assert cache.sizes == (0, 0, 0)


def test_key_match(cache):
    cache.insert([1, 2, 3, 4, 5])
    assert len(cache.match([1, 2, 6, 7, 8])[0]) == 2


def test_basic_insert_and_match(cache):
    assert cache.insert([1, 2, 3, 4, 5]) == 0
    for key, length in (([1, 2, 3, 4, 5], 5), ([1, 2, 3], 3), ([1, 2, 3, 4, 5, 6], 5), ([6, 7, 8], 0)):
        assert len(cache.match(key)[0]) == length


def test_basic_insert_with_value(cache):
    cache.insert([1, 2, 3, 4, 5], [9, 8, 7, 6, 5])
    assert cache.match([1, 2, 3])[0].tolist() == [9, 8, 7]


def test_prefix_extension(cache):
    cache.insert([1, 2, 3], [10, 11, 12])
    assert cache.insert([1, 2, 3, 4, 5], [20, 21, 22, 23, 24]) == 3
    assert cache.match([1, 2, 3])[0].tolist() == [10, 11, 12]
    assert cache.match([1, 2, 3, 4, 5])[0].tolist() == [10, 11, 12, 23, 24]
    assert cache.sizes[2] == 5


def test_lock_reference_counting(cache):
    cache.insert([1, 2, 3, 4, 5])
    node = cache.match([1, 2, 3])[1]
    for held in (1, 2):
        cache.tree.lock(node)
        assert (cache.sizes, node.num_locks) == ((2, 3, 5), held)
    cache.tree.unlock(node)
    assert cache.sizes == (2, 3, 5)
    cache.match([1])  # splits what is locked
    assert cache.sizes == (2, 3, 5)
    assert sorted(cache.tree.evict(5).tolist()) == [4, 5]
    cache.tree.unlock(node)
    assert cache.sizes == (3, 0, 3)


def test_eviction(cache):
    for key in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        cache.insert(key)
    node = cache.match([1, 2, 3])[1]
    cache.tree.lock(node)
    assert sorted(cache.tree.evict(5).tolist()) == [4, 5, 6, 8, 9]
    assert cache.sizes == (1, 3, 4)
    assert cache.tree.evict(5).tolist() == [7]
    assert cache.match([1, 2, 3])[0].tolist() == [1, 2, 3]


def test_least_recently_used_is_evicted_first(cache):
    """As nodes of that cache compare: those of earlier use are smaller."""
    for key in ([1, 2], [3, 4]):
        cache.insert(key)
    cache.match([1, 2])
    assert sorted(cache.tree.evict(2).tolist()) == [3, 4]


def test_get_cached_kv(cache):
    """The keys and values that were written for a text are found by it."""
    written, pages = np.arange(5 * 6).reshape(5, 2, 3), np.array([7, 3, 9, 1, 4])
    memory = np.zeros((12, 2, 3), int)
    memory[pages] = written
    cache.insert([1, 2, 3, 4, 5], pages)
    np.testing.assert_array_equal(memory[cache.match([1, 2, 3, 4])[0]], written[:4])


def test_empty_key_handling(cache):
    cache.insert([1, 2, 3])
    assert cache.insert([]) == 0
    for key in ([], [999, 888]):
        pages, node = cache.match(key)
        assert (pages.dtype, pages.shape, node) == (np.int32, (0,), cache.tree.root)


def test_device_consistency(cache):
    """Pages are integers on the host, however often nodes were split."""
    for key in ([1, 2, 3], [1, 2, 4], [1, 5]):
        cache.insert(key)
    pages = cache.match([1, 2, 4])[0]
    assert isinstance(pages, np.ndarray)
    assert (pages.dtype, pages.tolist()) == (np.int32, [1, 2, 4])


CONFIG = TextEngineConfig(cache_tokens=64)


def sequences(shares=True):
    """The owner of a tree, with 64 pages for texts of up to 64 tokens."""
    return SequencePool(CONFIG.cache_tokens, 64, 64, CONFIG.batch, shares)


def added(owner, tokens, max_tokens=1):
    answer = Answer(Request(tokens, max_tokens))
    owner.add(answer, np.array(tokens, np.int32), None)
    owner.admit()
    return answer


def compute(owner):
    """Notes that all texts are read."""
    for sequence in owner.running:
        sequence.mark_computed(len(sequence.tokens))
        sequence.is_read = True


def test_reset():
    owner = sequences()
    added(owner, [1, 2, 3])
    compute(owner)
    assert owner.tree.num_tokens == 3
    owner.forget()
    assert (owner.tree.num_evictable, owner.tree.num_locked, owner.tree.num_tokens) == (0, 0, 0)
    assert sorted(owner.free) == list(range(64))


def test_disabled_cache():
    """Nothing is found, held or kept where texts share nothing, and requests end as otherwise."""
    owner = sequences(shares=False)
    for _ in range(2):
        added(owner, [1, 2, 3, 4, 5])
        assert owner.running[-1].num_shared == 0
        compute(owner)
    assert (owner.tree.num_tokens, len(owner.free)) == (0, 54)
    for sequence in list(owner.running):
        owner.finish(sequence)
    assert sorted(owner.free) == list(range(64))


def is_conserved(owner):
    """The invariant of that cache's scheduler: pages are free, can be evicted, are protected, or are of a request."""
    own = sum(sequence.num_pages - sequence.num_shared for sequence in owner.running)
    return len(owner.free) + owner.tree.num_evictable + owner.tree.num_locked + own == 64


@pytest.mark.parametrize("num_read", [0, 4, 7, 16], ids=["not begun", "a part", "an odd part", "all"])
def test_chunked_tail_retract_no_leak(num_read):
    """A request that goes with a part of its prompt read leaves no page behind, whose beginning another one holds."""
    owner = sequences()
    first = added(owner, list(range(8)), 4)
    compute(owner)
    second = added(owner, list(range(16)), 4)
    owner.running[1].mark_computed(num_read)
    assert (owner.tree.num_locked, is_conserved(owner)) == (16, True)
    owner.cancel(second)
    assert (owner.tree.num_locked, is_conserved(owner)) == (8, True)
    owner.cancel(first)
    assert (owner.tree.num_locked, is_conserved(owner)) == (0, True)
    assert len(owner.free) + owner.tree.num_tokens == 64


def test_retract_after_growth_no_leak():
    """And one that goes in the midst of its answer."""
    owner = sequences()
    answer = added(owner, list(range(8)), 4)
    compute(owner)
    sequence = owner.running[0]
    for token in (20, 21):
        owner.append([(sequence, token)])
        assert is_conserved(owner)
    owner.cancel(answer)
    assert is_conserved(owner)
    assert owner.tree.num_locked == 0


def test_the_same_answer_twice_no_leak():
    """Two requests compute the same text, each for itself; one copy is kept."""
    owner = sequences()
    answers = [added(owner, list(range(8)), 4) for _ in range(2)]
    compute(owner)
    owner.append([(sequence, 20) for sequence in owner.running])
    for sequence in owner.running:
        sequence.mark_computed(9)
    for answer in answers:
        owner.cancel(answer)
        assert is_conserved(owner)
    assert (owner.tree.num_tokens, len(owner.free)) == (9, 55)
