"""Locality: the order of training sequences from random to by domain, each once an epoch, and resumed exactly."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.data.config import DataConfig, Mixture
from swift.data.index import find_index
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.data.sources import InMemory, TextFiles, TokenFile, domain_of
from swift.data.stream import open_stream
from swift.data.windows import STRETCH_BATCHES, mixture_indices, order_by_domain
from swift.errors import SettingError

WIDTH, SHAPE = 5, (2, 2, 5)
LETTERS = "abc"
DOCUMENTS = [LETTERS[number * 7 % 11 % 3] * (7 + number % 4) for number in range(160)]
"""Documents whose domains alternate, each of one letter."""
ROWS = Pipeline(Rows([{"text": text, "kind": text[0]} for text in DOCUMENTS]))
PIPED = DataConfig(ROWS, domain="kind")
MIXED = DataConfig(Mixture((InMemory(["a" * 40] * 20), InMemory(["b" * 40] * 9)), (3.0, 1.0)), validation_share=0.2)


def rows_at(loader, step):
    """The sequences of a batch, as tuples of their tokens."""
    return list(map(tuple, loader.batch(step).inputs.reshape(-1, WIDTH).tolist()))


def rows_of(loader, num_batches):
    """The sequences of the first batches."""
    return [row for step in range(num_batches) for row in rows_at(loader, step)]


def letters_of(loader, step):
    """The first letter of each sequence of a batch: its domain, but where it begins with the end of another."""
    return [next(chr(token) for token in row if token in LETTERS.encode()) for row in rows_at(loader, step)]


def purity(loader, num_batches):
    """The mean share of a batch's sequences that are of its most frequent letter."""
    sizes = [Counter(letters_of(loader, step)) for step in range(num_batches)]
    return float(np.mean([max(size.values()) / size.total() for size in sizes]))


domains = st.lists(st.integers(0, 5), max_size=80).map(lambda found: np.array(found, np.int64))


@given(domains, st.floats(0, 1), st.integers(0, 99))
def test_each_window_of_a_stretch_comes_once_and_a_domain_keeps_its_order(domains_N, locality, seed):
    order_N = order_by_domain(domains_N, locality, np.random.default_rng(seed))
    assert sorted(order_N) == list(range(len(domains_N)))
    for domain in set(domains_N.tolist()):
        mine = [place for place in order_N.tolist() if domains_N[place] == domain]
        assert mine == sorted(mine)


@given(domains, st.integers(0, 99))
def test_the_ends_of_the_knob_are_the_order_without_it_and_the_domains_one_after_the_other(domains_N, seed):
    first, last = (order_by_domain(domains_N, end, np.random.default_rng(seed)) for end in (0.0, 1.0))
    assert first.tolist() == list(range(len(domains_N)))
    assert np.count_nonzero(np.diff(domains_N[last])) == max(0, len(set(domains_N.tolist())) - 1)


def test_without_locality_the_order_is_that_of_grains_shuffle(make_loader):
    tokens = open_stream(PIPED, "train").read(0, 10**6).tolist()
    rows = [(*tokens[begin : begin + WIDTH],) for begin in range(0, len(tokens) - 1, WIDTH)]
    rows[-1] = (*tokens[(len(rows) - 1) * WIDTH : -1], *[0] * WIDTH)[:WIDTH]
    seed = int(np.random.SeedSequence(3).generate_state(1)[0])
    order = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
    loader = make_loader(PIPED, shape=SHAPE, seed=3)
    assert rows_of(loader, 100) == [order[place] for place in range(400)]


@pytest.mark.parametrize("locality", [0.0, 1e-12])  # with the least of it stretches are arranged, and nothing moves
def test_without_locality_a_mixture_has_the_order_of_grains_mix(make_loader, locality):
    def shuffled(source, number):
        tokens = open_stream(replace(MIXED, source=source), "train").read(0, 10**6).tolist()
        rows = [(*tokens[begin : begin + WIDTH],) for begin in range(0, len(tokens) - 1, WIDTH)]
        rows[-1] = (*tokens[(len(rows) - 1) * WIDTH : -1], *[0] * WIDTH)[:WIDTH]
        seed = int(np.random.SeedSequence(3).generate_state(number + 1)[number])
        return grain.MapDataset.source(rows).shuffle(seed=seed).repeat()

    each = [shuffled(source, number) for number, source in enumerate(MIXED.source.sources)]
    order = grain.MapDataset.mix(each, weights=[3.0, 1.0])
    loader = make_loader(replace(MIXED, locality=locality), shape=SHAPE, seed=3)
    assert rows_of(loader, 100) == [order[place] for place in range(400)]


@settings(max_examples=50)
@given(st.lists(st.floats(1e-9, 1e3) | st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 10**15))
def test_the_places_of_a_mixture_are_those_of_grains_mix(weights, first):
    endless = grain.MapDataset.range(sys.maxsize)
    each = [endless.map(lambda place, source=source: [source, place]) for source in range(len(weights))]
    order = grain.MapDataset.mix(each, weights=list(map(float, weights)))
    found = mixture_indices(np.arange(first, first + 40), weights)
    assert found.T.tolist() == [order[place] for place in range(first, first + 40)]


@pytest.mark.parametrize("locality", [0.01, 1.0])
def test_every_document_comes_exactly_once_an_epoch(make_loader, locality):
    loader = make_loader(replace(PIPED, locality=locality), shape=(1, 1, WIDTH), seed=1)
    size = loader.num_windows
    epochs = [[loader.batch(epoch * size + place) for place in range(size)] for epoch in range(2)]
    labels = [Counter(np.concatenate([one.labels[one.valid] for one in epoch]).tolist()) for epoch in epochs]
    tokens = open_stream(PIPED, "train").read(0, 10**6)
    assert labels[0] == labels[1] == Counter(tokens.tolist()) - Counter([ord(DOCUMENTS[0][0])])  # the first is no label
    first, second = ([tuple(one.inputs.ravel().tolist()) for one in epoch] for epoch in epochs)
    assert Counter(first) == Counter(second)
    assert first != second


def test_by_domain_batches_are_pure_but_at_borders(make_loader):
    loader = make_loader(replace(PIPED, locality=1.0), shape=SHAPE)
    num = loader.num_batches_per_epoch
    assert num > STRETCH_BATCHES, "an epoch must have several stretches for this test"
    mixed = [step for step in range(num) if len(set(letters_of(loader, step))) > 1]
    assert len(mixed) <= -(-num // STRETCH_BATCHES) * len(LETTERS)


def test_purity_grows_with_the_knob(make_loader):
    found = [purity(make_loader(replace(PIPED, locality=one), shape=SHAPE), 70) for one in (0, 0.25, 0.5, 0.75, 1)]
    assert all(after > before + 0.02 for before, after in pairwise(found)), found


def test_a_mixture_goes_by_source_and_each_source_stays_whole(make_loader):
    local, plain = (make_loader(replace(MIXED, locality=one), shape=(1, 4, 5)) for one in (1.0, 0.0))
    num = 2 * STRETCH_BATCHES
    assert sum(len({max(row) for row in local.batch(step).inputs[0].tolist()}) > 1 for step in range(num)) <= 2
    for letter in b"ab":
        mine, usual = ([row for row in rows_of(one, num) if max(row) == letter] for one in (local, plain))
        assert mine == usual


def test_a_resumed_run_sees_what_it_would_have_seen_and_only_with_its_locality(make_loader):
    config = replace(PIPED, locality=0.5)
    loader, again = make_loader(config), make_loader(config)
    for _ in range(5):
        next(loader)
    state = loader.state()
    again.restore(state)
    assert np.array_equal(next(again).inputs, next(loader).inputs)
    older = {**state, "data": {name: value for name, value in state["data"].items() if name != "locality"}}
    for kept, other in ((state, 0.6), (state, 0.0), (older, 0.5)):
        with pytest.raises(SettingError, match="'locality': "):
            make_loader(replace(PIPED, locality=other)).restore(kept)
    moved = Pipeline(Rows([{"text": text, "kind": text[0] == "b"} for text in DOCUMENTS]))
    with pytest.raises(SettingError, match="'domains': "):
        make_loader(replace(config, source=moved)).restore(state)


def test_an_index_has_the_domains(make_loader, tmp_path):
    for place in ("one", "two"):
        (tmp_path / "corpus" / place).mkdir(parents=True)
        for number in range(9):
            (tmp_path / "corpus" / place / f"{number}.txt").write_text(place * 30)
    files = DataConfig(TextFiles(f"{tmp_path}/corpus/**/*.txt"), locality=1.0)
    for config in (files, replace(PIPED, locality=1.0)):
        path = find_index(config, tmp_path / "kept", print)
        assert path == find_index(replace(config, locality=0.0), tmp_path / "kept", print)
        plain, indexed = make_loader(config), make_loader(config, corpus=path)
        for step in (0, 7, 70):
            assert np.array_equal(plain.batch(step).inputs, indexed.batch(step).inputs)
        assert plain.state() == indexed.state()


def test_a_name_has_a_domain():
    names = ("asyncio/queues.py", "a/b/part.jsonl:17", "part.jsonl:17", "record 5", "read.me")
    assert [domain_of(name) for name in names] == ["asyncio", "a/b/part.jsonl", "part.jsonl", "", ""]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataConfig(locality=1.5), "DataConfig.locality = 1.5: must be a number from 0 to 1"),
        (lambda: DataConfig(locality=True), "DataConfig.locality = True: must be a number from 0 to 1"),
        (lambda: DataConfig(TokenFile("t.bin"), locality=0.5), "DataConfig.locality = 0.5: must be 0 with a TokenFile"),
        (lambda: DataConfig(domain="kind"), "DataConfig.domain = 'kind': must be None unless DataConfig.source is"),
    ],
)
def test_locality_without_a_meaning_is_refused(make, said):
    with pytest.raises(SettingError) as error:
        make()
    assert str(error.value).startswith(said)


def test_one_domain_and_a_missing_field_are_refused(make_loader):
    with pytest.raises(SettingError, match=r"DataConfig.locality = 0.5: must be 0 where all documents are of one"):
        make_loader(DataConfig(ROWS, locality=0.5))
    with pytest.raises(SettingError, match=r"record 0: .*a document has no field 'topic', see DataConfig.domain"):
        make_loader(DataConfig(ROWS, domain="topic"))
