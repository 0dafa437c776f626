import ast
import json
import os
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swift.data
from swift.data.config import DataConfig, in_split
from swift.data.sources import DataError, TokenFile
from swift.data.stream import open_stream
from swift.errors import SettingError

SHAPE = (2, 3, 5)


@pytest.fixture(scope="module")
def config(memory_texts):
    return DataConfig(memory_texts(tuple(f"text {number} " * 3 for number in range(30))), validation_share=0.3)


def assert_equal(one, other):
    for array, expected in zip(one, other, strict=True):
        if expected is None:
            assert array is None
            continue
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype


def epoch_of(loader, epoch, num_sequences=6):
    """The windows of an epoch in the order in which they come, as tuples of labels."""
    first = epoch * loader.num_windows
    steps = range(first // num_sequences, (first + loader.num_windows) // num_sequences + 1)
    rows = np.concatenate([loader.batch(step).labels.reshape(num_sequences, -1) for step in steps])
    return [tuple(row) for row in rows.tolist()][first % num_sequences :][: loader.num_windows]


def test_shapes_and_types(config, make_loader):
    batch = make_loader(config).batch(0)
    assert isinstance(batch, swift.data.Batch)
    assert [array.shape for array in batch[:3]] == [SHAPE] * 3
    assert [array.dtype for array in batch[:3]] == [np.int32, np.int32, np.bool_]
    assert batch[3:] == (None, None)
    assert (make_loader(config).vocab_size, make_loader(config).tokenizer) == (256, config.tokenizer)


def test_the_same_arguments_give_the_same_batches(config, make_loader):
    one, other = make_loader(config, seed=3), make_loader(config, seed=3)
    for step in (0, 5, 100_000):
        assert_equal(one.batch(step), other.batch(step))


def test_every_window_is_seen_once_an_epoch_in_another_order(config, make_loader):
    loader = make_loader(config)
    assert loader.num_windows % 6, "an epoch must end inside a batch for this test to mean something"
    tokens = open_stream(config, "train").read(0, 10**6).astype(np.int32)
    padded = np.append(tokens[1:], np.zeros(-(len(tokens) - 1) % 5, np.int32))
    in_order = [tuple(row) for row in padded.reshape(-1, 5).tolist()]
    epochs = [epoch_of(loader, epoch) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(in_order)] * 3
    assert len({tuple(epoch) for epoch in [in_order, *epochs]}) == 4


def test_the_order_differs_by_seed(config, make_loader):
    # Seeds that follow each other are those that Grain alone would give the same orders, one epoch later.
    orders = [tuple(epoch_of(make_loader(config, seed=seed), epoch)) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9


def test_validation_comes_in_order_and_scores_every_token_once_a_pass(config, make_loader):
    loader = make_loader(config, "validation", shape=(2, 2, 5))
    tokens = open_stream(config, "validation").read(0, 10**6).astype(np.int32)
    assert loader.num_windows % 4, "a pass must end inside a batch for this test to mean something"
    for first in (0, loader.num_batches_per_epoch):
        batches = [loader.batch(first + step) for step in range(loader.num_batches_per_epoch)]
        np.testing.assert_array_equal(np.concatenate([batch.labels[batch.valid] for batch in batches]), tokens[1:])
        np.testing.assert_array_equal(np.concatenate([batch.inputs[batch.valid] for batch in batches]), tokens[:-1])


def test_some_sequences_of_a_batch_are_those_of_the_whole_and_the_others_padding(config, make_loader):
    is_read = np.array([[True, False, True], [False, True, False]])
    for step in (0, 7):
        part, whole = make_loader(config).batch(step, is_read), make_loader(config).batch(step)
        assert_equal(part, whole.map(lambda leaf: (leaf * is_read[..., None]).astype(leaf.dtype)))
    assert_equal(make_loader(config).batch(3, np.ones((2, 3), bool)), make_loader(config).batch(3))


def test_a_sequences_random_key_follows_from_seed_iteration_and_place(config, make_loader):
    loader = make_loader(config, draws_keys=True)
    keys = [loader.batch(step).keys for step in (0, 1)]
    assert all(of_step.dtype == np.uint32 and of_step.shape == (*SHAPE[:2], 2) for of_step in keys)
    assert len(np.unique(np.concatenate(keys).reshape(-1, 2), axis=0)) == 2 * SHAPE[0] * SHAPE[1]
    np.testing.assert_array_equal(loader.batch(1, np.zeros(SHAPE[:2], bool)).keys, keys[1])
    np.testing.assert_array_equal(loader.microbatch(1, 1).keys, keys[1][1])
    np.testing.assert_array_equal(make_loader(config, draws_keys=True).batch(1).keys, keys[1])
    assert (make_loader(config, draws_keys=True, seed=5).batch(1).keys != keys[1]).any()
    assert make_loader(config).batch(0).keys is None
    plain = make_loader(config).batch(1)
    assert_equal(loader.batch(1)._replace(keys=None), plain)


def test_random_access_equals_iteration(config, make_loader):
    loader, other = make_loader(config), make_loader(config)
    for step, batch in zip(range(2 * loader.num_batches_per_epoch), loader, strict=False):
        assert_equal(other.batch(step), batch)
        for index in range(SHAPE[0]):
            assert_equal(other.microbatch(step, index), batch.map(lambda leaf, index=index: leaf[index]))


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(num_before=st.integers(0, 40), num_after=st.integers(1, 15))
def test_a_resumed_run_sees_the_batches_it_would_have_seen(config, make_loader, num_before, num_after):
    loader = make_loader(config)
    for _ in range(num_before):
        next(loader)
    state = json.loads(json.dumps(loader.state()))
    resumed = make_loader(config)
    resumed.restore(state)
    assert resumed.state() == state
    for _ in range(num_after):
        assert_equal(next(resumed), next(loader))


def test_a_state_does_not_move_with_its_loader(config, make_loader):
    loader = make_loader(config)
    state = loader.state()
    first = next(loader)
    loader.restore(state)
    assert_equal(next(loader), first)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"split": "validation"}, r"\{.*'split': 'train'.*\}: this run has split = 'validation', num_tokens = "),
        ({"seed": 1}, r"\{'seed': 0\}: this run has seed = 1;"),
        ({"shape": (2, 3, 4)}, r"\{'sequence_length': 5\}: this run has sequence_length = 4;"),
    ],
)
def test_a_state_of_another_run_is_refused(config, make_loader, changed, expected):
    loader = make_loader(config, **changed)
    with pytest.raises(SettingError, match=f"the saved data state = .*{expected}"):
        loader.restore(make_loader(config).state())
    assert loader.state()["next_step"] == 0


def test_a_state_of_other_data_or_another_version_is_refused(config, make_loader, memory_texts):
    state = make_loader(config).state()
    texts = config.source.texts
    other = DataConfig(memory_texts(tuple(text.upper() for text in texts)), validation_share=0.3)
    with pytest.raises(SettingError, match=r"this run has checksum = \d+, digest = '\w+';"):
        make_loader(other).restore(state)
    with pytest.raises(SettingError, match="version of the saved data state = 3: must be 2"):
        make_loader(config).restore({**state, "version": 3})


def test_a_token_file_from_end_to_end(tmp_path, make_loader):
    np.arange(60_000).astype("<u2").tofile(tmp_path / "tokens.bin")
    source = TokenFile(str(tmp_path / "tokens.bin"), vocab_size=60_000)
    loader = make_loader(DataConfig(source, validation_share=0.5), shape=(2, 2, 100))
    assert loader.vocab_size == 60_000
    batch = loader.batch(3)
    assert (batch.labels - batch.inputs)[batch.valid].tolist().count(1) >= batch.valid.sum() - 1
    with pytest.raises(SettingError, match=r"DataConfig.source = TokenFile.* the vocabulary ends at 255"):
        make_loader(DataConfig(TokenFile(source.path), validation_share=0.5), shape=(2, 2, 100))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_sequence_longer_than_the_data(config, make_loader, split):
    num_tokens = open_stream(config, split).num_tokens
    message = f"Loader.sequence_length = {num_tokens}: the {split} split holds {num_tokens} tokens"
    with pytest.raises(SettingError, match=message):
        make_loader(config, split, shape=(1, 1, num_tokens))
    assert make_loader(config, split, shape=(1, 1, num_tokens - 1)).batch(0).valid.all()


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ({"shape": (0, 1, 1)}, "Loader.num_microbatches = 0: must be a whole number of at least 1"),
        ({"shape": (1, 1.5, 1)}, "Loader.sequences_per_microbatch = 1.5: must be"),
        ({"shape": (1, 1, 0)}, "Loader.sequence_length = 0: must be"),
        ({"seed": -1}, "Loader.seed = -1: must be a whole number of at least 0"),
        ({"split": "test"}, "Loader.split = 'test': must be one of train, validation"),
    ],
)
def test_numbers_out_of_range(config, make_loader, changed, setting):
    with pytest.raises(SettingError, match=setting):
        make_loader(config, **changed)


def test_the_package_imports_neither_jax_nor_gin():
    for path in Path(swift.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"jax", "gin", "flax"}, path


@pytest.fixture
def many_tokens(tmp_path):
    """A file of 2 million tokens, too many to be looked at one by one in the beginning; and a config of it."""
    path = tmp_path / "tokens.bin"
    (np.arange(2_000_000) * 7919 % 250).astype("<u2").tofile(path)
    return path, DataConfig(TokenFile(str(path)), validation_share=0.3)


def overwrite(path, place, token):
    """Puts another token in the midst of a file."""
    with open(path, "r+b") as file:
        file.seek(2 * place)
        file.write(np.array([token], "<u2").tobytes())


def test_a_token_beyond_the_vocabulary_that_the_sample_misses_ends_the_run_where_it_is_read(many_tokens, make_loader):
    path, config = many_tokens
    overwrite(path, 1_000_001, 300)
    loader = make_loader(config, shape=(1, 100, 1000))
    message = r"tokens.bin holds token 300 \(token 1000001 of the file\), the vocabulary ends at 255$"
    with pytest.raises(DataError, match=message):
        deque(map(loader.batch, range(loader.num_batches_per_epoch)), maxlen=0)


def test_a_sequence_that_is_not_wanted_is_not_read(many_tokens, make_loader):
    """A token beyond the vocabulary lies in one of two sequences: whoever reads only the other does not find it."""
    path, config = many_tokens
    overwrite(path, 1_000_001, 300)
    loader, parts = make_loader(config, shape=(1, 2, 1000)), np.array([[[True, False]], [[False, True]]])

    def finds(step, is_read):
        try:
            loader.batch(step, is_read)
        except DataError:
            return True
        return False

    steps = [step for step in range(loader.num_batches_per_epoch) if finds(step, np.ones((1, 2), bool))]
    assert steps
    assert all(sum(finds(step, part) for part in parts) == 1 for step in steps)


def test_a_file_that_shrinks_is_told(many_tokens, make_loader):
    path, config = many_tokens
    loader = make_loader(config)
    loader.batch(0)
    os.truncate(path, 3_999_998)
    with pytest.raises(DataError, match=r"tokens.bin has shrunk from 4000000 to 3999998 bytes since the run opened it"):
        loader.batch(1)
    os.truncate(path, 0)
    with pytest.raises(DataError, match="has shrunk from 4000000 to 0 bytes"):
        loader.batch(1)


def test_a_file_that_is_overwritten_is_told(many_tokens, make_loader):
    path, config = many_tokens
    loader = make_loader(config)
    before = loader.batch(0)
    os.utime(path)
    assert_equal(loader.batch(0), before)
    path.write_bytes(np.zeros(2_000_000, "<u2").tobytes())
    with pytest.raises(DataError, match=r"tokens.bin has been overwritten since the run opened it"):
        loader.batch(0)


def test_a_file_whose_name_is_gone_or_taken_is_read_on(many_tokens, make_loader):
    path, config = many_tokens
    loader = make_loader(config)
    batches = [loader.batch(step) for step in range(3)]
    (path.parent / "other").write_bytes(bytes(100))
    os.replace(path.parent / "other", path)
    assert_equal(loader.batch(0), batches[0])
    path.unlink()
    for step, batch in enumerate(batches):
        assert_equal(loader.batch(step), batch)


def test_a_file_that_grows_is_read_as_it_was(many_tokens, make_loader):
    path, config = many_tokens
    loader = make_loader(config)
    before = loader.batch(5)
    with path.open("ab") as file:
        file.write(bytes(1000))
    assert_equal(loader.batch(5), before)
    with pytest.raises(SettingError, match="this run has num_tokens = "):
        make_loader(config).restore(loader.state())


def test_a_file_that_was_written_to_before_a_run_resumes_is_noticed(many_tokens, make_loader):
    path, config = many_tokens
    state = json.loads(json.dumps(make_loader(config).state()))
    assert make_loader(config).restore(state) == []
    overwrite(path, 1_000_001, 77)
    (line,) = make_loader(config).restore(state)
    assert line.startswith(f"{path} has been written to since the checkpoint")
    overwrite(path, 0, 77)
    with pytest.raises(SettingError, match="this run has checksum = "):
        make_loader(config).restore(state)


def test_a_letter_in_a_long_text_is_noticed(make_loader, memory_texts):
    texts = [f"{number} " * 500 for number in range(1000)]
    place = np.flatnonzero(in_split((f"text-{number}" for number in range(1000)), "train", 0.3))[300]
    changed = [text.replace(" ", "!", 1) if number == place else text for number, text in enumerate(texts)]
    before, after = (DataConfig(memory_texts(tuple(some)), validation_share=0.3) for some in (texts, changed))
    assert open_stream(before, "train").checksum() == open_stream(after, "train").checksum()
    with pytest.raises(SettingError, match=r"this run has digest = '\w+';"):
        make_loader(after).restore(make_loader(before).state())


def test_a_state_of_a_version_that_noted_less_is_restored(config, make_loader):
    state = make_loader(config).state()
    del state["file"], state["data"]["digest"]
    assert make_loader(config).restore(state) == []
