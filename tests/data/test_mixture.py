"""Mixtures: the shares of their sources in every batch, each source whole in each of its epochs, resumed exactly."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from swift.data.config import DataConfig, Mixture
from swift.data.index import find_index
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.data.sources import InMemory, TextFiles
from swift.errors import SettingError

ONE, OTHER = (InMemory([letter * 40 for _ in range(num)]) for letter, num in (("a", 20), ("b", 9)))
MIXED = DataConfig(Mixture((ONE, OTHER), (3.0, 1.0)), validation_share=0.2)


def letters(batch) -> list[str]:
    """The letter of each sequence."""
    return [chr(max(row)) for row in batch.inputs.reshape(-1, batch.inputs.shape[-1])]


def test_every_batch_has_the_shares_of_the_weights(make_loader):
    loader = make_loader(MIXED, shape=(2, 4, 5))
    assert [Counter(letters(loader.batch(step))) for step in (0, 1, 50)] == [Counter(a=6, b=2)] * 3


def test_each_source_is_whole_in_each_of_its_epochs(make_loader):
    loader, alone = make_loader(MIXED, shape=(1, 4, 5)), make_loader(replace(MIXED, source=OTHER), shape=(1, 1, 5))
    size = alone.num_windows
    rows = [loader.batch(step).inputs[0] for step in range(2 * size)]
    others = [tuple(row) for batch in rows for row in batch if max(row) == ord("b")]
    assert len(others) == 2 * size
    whole = Counter(tuple(alone.batch(step).inputs[0, 0]) for step in range(size))
    assert Counter(others[:size]) == Counter(others[size:]) == whole


def test_validation_has_every_token_of_every_source_once(make_loader):
    loader = make_loader(MIXED, "validation", shape=(1, 4, 5))
    singles = [make_loader(replace(MIXED, source=one), "validation", shape=(1, 1, 5)) for one in (ONE, OTHER)]
    assert loader.num_windows == sum(one.num_windows for one in singles)
    rows = [loader.batch(step) for step in range(loader.num_batches_per_epoch)]
    valid = sum(int(row.valid.sum()) for row in rows)
    assert valid == sum(int(one.batch(step).valid.sum()) for one in singles for step in range(one.num_windows))


def test_a_mixture_resumes_with_its_sources_and_weights_only(make_loader):
    loader = make_loader(MIXED)
    for _ in range(3):
        next(loader)
    state = loader.state()
    again = make_loader(MIXED)
    again.restore(state)
    assert np.array_equal(next(again).inputs, next(loader).inputs)
    for other in (
        replace(MIXED, source=Mixture((ONE, OTHER), (3.0, 2.0))),
        replace(MIXED, source=Mixture((OTHER, ONE), (3.0, 1.0))),
        replace(MIXED, source=Mixture((ONE,), (3.0,))),
    ):
        with pytest.raises(SettingError, match="a run resumes with the data and settings that it began with"):
            make_loader(other).restore(state)


def test_indexes_of_all_sources_are_found_again(make_loader, tmp_path):
    for name, text in (("a", "first " * 30), ("b", "second " * 30)):
        for number in range(4):
            (tmp_path / f"{name}{number}.txt").write_text(text)
    piped = Pipeline(Rows([{"text": "third " * 20}] * 3))
    config = DataConfig(Mixture((TextFiles(f"{tmp_path}/a*"), TextFiles(f"{tmp_path}/b*"), piped), (1.0, 2.0, 1.0)))
    path = find_index(config, tmp_path / "kept", print)
    assert len([one for one in path.iterdir() if one.is_dir()]) == 3
    plain, indexed = make_loader(config), make_loader(config, corpus=path)
    for step in range(5):
        assert np.array_equal(plain.batch(step).inputs, indexed.batch(step).inputs)
    assert plain.state() == indexed.state()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mixture((ONE, OTHER), (1.0,)), "Mixture.weights = (1.0,): must be as many as Mixture.sources, 2"),
        (lambda: Mixture((ONE, OTHER), (1.0, -1.0)), "Mixture.weights = (1.0, -1.0): must be numbers above 0"),
        (lambda: Mixture((ONE, OTHER), (0, 0)), "Mixture.weights = (0, 0): must be numbers above 0"),
        (lambda: Mixture((), ()), "Mixture.sources = (): must be texts, token files or pipelines"),
        (lambda: DataConfig(MIXED.source, validation_source=ONE), "DataConfig.validation_source = "),
    ],
)
def test_a_mixture_without_meaning_is_refused(make, said):
    with pytest.raises(SettingError) as error:
        make()
    assert str(error.value).startswith(said)
