"""Runs that resume with batches of another size: every sequence is read once, in the order of the run that stays."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from swift.data.config import DataConfig, Mixture
from swift.data.loader import check_same_position, state_at
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.data.sources import InMemory
from swift.errors import SettingError

SIZES = [((2, 3), 7), ((1, 4), 11), ((3, 5), 5), ((1, 1), 40), ((2, 3), 9)]
"""The micro-batches, the sequences of each, and the iterations between changes; most end inside an epoch."""
NUM_SEQUENCES = sum(M * B * steps for (M, B), steps in SIZES)
DOCUMENTS = ["abc"[number * 7 % 11 % 3] * (9 + number % 4) for number in range(40)]
LETTERS = Pipeline(Rows([{"text": text, "kind": text[0]} for text in DOCUMENTS]))
ONE, OTHER = InMemory(["a" * 40 + str(n) for n in range(12)]), InMemory(["b" * 40 + str(n) for n in range(5)])
MIXTURE = Mixture((ONE, OTHER), (3.0, 1.0))


@dataclass(frozen=True)
class Lines:
    """A stream of 30 documents, which is read again and again."""

    def stream(self, split):
        return iter(f"{split} {number} " * 2 for number in range(30))


CONFIGS = {
    "one source": DataConfig(LETTERS, validation_share=0.3),
    "locality": DataConfig(LETTERS, domain="kind", locality=0.7, validation_share=0.3),
    "mixture": DataConfig(MIXTURE, validation_share=0.2),
    "mixture with locality": DataConfig(MIXTURE, locality=0.5, validation_share=0.2),
    "stream": DataConfig(Lines()),
}


def sequences(batch):
    return batch.labels.reshape(-1, batch.labels.shape[-1]).tolist()


def resumed(make_loader, config, shape, state, **options):
    loader = make_loader(config, shape=(*shape, 5), **options)
    return loader, loader.restore(json.loads(json.dumps(state)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_sequences_follow_each_other_through_all_sizes(config, make_loader):
    stays = make_loader(config, shape=(*SIZES[0][0], 5))
    expected = [row for step in range(-(-NUM_SEQUENCES // 6)) for row in sequences(stays.batch(step))]
    loader, done, seen = make_loader(config, shape=(*SIZES[0][0], 5)), 0, []
    for shape, steps in SIZES:
        loader, _ = resumed(make_loader, config, shape, loader.state())
        for _ in range(steps):
            batch = next(loader)
            assert batch.labels.shape == (*shape, 5)
            assert [loader.microbatch(done, m).labels.tolist() for m in range(shape[0])] == batch.labels.tolist()
            seen += sequences(batch)
            done += 1
    assert loader.state()["next_sequence"] == NUM_SEQUENCES == len(seen)
    assert seen == expected[:NUM_SEQUENCES]
    if config is not CONFIGS["stream"]:
        assert loader.num_windows < NUM_SEQUENCES / 2, "the test is to see several epochs"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_run_that_has_changed_resumes_as_if_it_had_not_stopped(config, make_loader):
    before = make_loader(config, shape=(2, 3, 5))
    first, _ = resumed(make_loader, config, (1, 5), state_at(before.state(), 4))
    again, lines = resumed(make_loader, config, (1, 5), state_at(first.state(), 9))
    assert lines == []
    for step in range(9, 20):
        assert sequences(again.batch(step)) == sequences(first.batch(step))
    again.skip_to(30)
    assert sequences(again.batch(30)) == sequences(first.batch(30))


def test_a_change_is_told_and_other_divisions_of_the_same_batch_are_none(make_loader):
    config, state = CONFIGS["one source"], None
    state = state_at(make_loader(config, shape=(2, 3, 5)).state(), 4)
    assert resumed(make_loader, config, (3, 2), state)[1] == []
    assert resumed(make_loader, config, (1, 4), state)[1] == [
        "iterations have 4 sequences from 5 on (before: 6), beginning with the run's sequence 25; the schedule of the "
        "learning rate still counts iterations"
    ]


@pytest.mark.parametrize("name", ["one source", "locality"])
def test_a_state_that_counts_batches_is_one_of_sequences_too(name, make_loader):
    config = CONFIGS[name]
    state = state_at(make_loader(config, shape=(2, 3, 5)).state(), 4)
    old = {key: value for key, value in state.items() if key not in ("next_sequence", "initial_batch_size")}
    for one, other in ((state, old),):
        loaders = [resumed(make_loader, config, (1, 4), found)[0] for found in (one, other | {"version": 1})]
        assert sequences(loaders[0].batch(7)) == sequences(loaders[1].batch(7))
        assert loaders[0].state() == loaders[1].state()


def test_a_key_is_of_the_iteration_and_the_place_in_it_whatever_came_before(make_loader):
    config = CONFIGS["one source"]
    state = state_at(make_loader(config, shape=(2, 3, 5), draws_keys=True).state(), 4)
    loader, _ = resumed(make_loader, config, (2, 4), state, draws_keys=True)
    fresh = make_loader(config, shape=(2, 4, 5), draws_keys=True)
    keys = [loader.batch(step).keys for step in (4, 5, 6)]
    for step, found in zip((4, 5, 6), keys, strict=True):
        np.testing.assert_array_equal(found, fresh.batch(step).keys)
    assert len({tuple(key) for found in keys for key in found.reshape(-1, 2).tolist()}) == 3 * 8


def test_a_running_process_does_not_go_back_before_its_change(make_loader):
    config = CONFIGS["one source"]
    before = make_loader(config, shape=(2, 3, 5)).state()
    now = resumed(make_loader, config, (1, 4), state_at(before, 4))[0].state()
    check_same_position(state_at(before, 4), now)
    check_same_position(state_at(now, 9), now)
    with pytest.raises(SettingError, match=r"sequence of the saved data state = 12: .* 4 sequences, would be at 16"):
        check_same_position(state_at(before, 2), now)
