"""Pipelines as the data of a run: the batches of the documents that they leave, from an index or not."""

from dataclasses import dataclass

import numpy as np
import pytest

from swift.data.config import DataConfig
from swift.data.index import find_index
from swift.data.pipeline import Pipeline
from swift.data.records import Documents, Rows
from swift.data.sources import TextFiles
from swift.data.tokenizer import ByteTokenizer
from swift.errors import SettingError
from tests.data.operators import LongerThan

TEXTS = [f"document {number} " * (1 + number % 5) for number in range(30)]


@dataclass(frozen=True)
class Upper:
    def __call__(self, sample) -> dict:
        return {"text": sample["text"].upper()}


@pytest.fixture
def folder(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text)
    return tmp_path


def equal_batches(loader, other, num=7) -> bool:
    return all(np.array_equal(loader.batch(step).inputs, other.batch(step).inputs) for step in range(num))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_texts_are_a_pipeline_without_operators(make_loader, folder, tmp_path_factory, split):
    texts = TextFiles(f"{folder}/*.txt")
    plain, piped = DataConfig(texts, validation_share=0.3), DataConfig(Pipeline(Documents(texts)), validation_share=0.3)
    path = find_index(piped, tmp_path_factory.mktemp("kept"), print)
    assert path is not None
    for corpus in (None, path):
        assert equal_batches(make_loader(plain, split), make_loader(piped, split, corpus=corpus))


def test_an_index_has_what_operators_leave_and_is_found_again(folder, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    documents = Pipeline(Documents(TextFiles(f"{folder}/*.txt")))
    changed = documents.filter(LongerThan(40)).map(Upper(), reads=("text",), writes=("text",))
    same = DataConfig(
        Pipeline(Rows([{"text": text.upper()} for text in TEXTS if len(text) > 40])), validation_share=0.5
    )
    config = DataConfig(changed, validation_share=0.5)
    path = find_index(config, kept, print)
    assert path == find_index(DataConfig(changed, validation_share=0.5), kept, print)
    assert path != find_index(DataConfig(documents.filter(LongerThan(41)), validation_share=0.5), kept, print)
    sums = [
        sorted(int(row.sum()) for split in ("train", "validation") for row in _documents(one, split, corpus))
        for one, corpus in ((config, path), (config, None), (same, None))
    ]
    assert sums[0] == sums[1] == sums[2]
    assert len(sums[0]) == sum(len(text) > 40 for text in TEXTS)


def _documents(config, split, corpus) -> list[np.ndarray]:
    from swift.data.index import corpus_stream

    tokens = corpus_stream(config, split, corpus)
    whole = np.asarray(tokens.read(0, tokens.num_tokens))
    ends = np.flatnonzero(whole == ByteTokenizer().separator)
    assert ends[-1] == len(whole) - 1
    return np.split(whole, ends[:-1] + 1)


def test_each_source_has_its_split():
    first, second = (Pipeline(Rows([{"text": word}] * 3)) for word in ("train", "test"))
    config = DataConfig(first, validation_source=second)
    assert [len(_documents(config, split, None)) for split in ("train", "validation")] == [3, 3]
    assert bytes(_documents(config, "validation", None)[0]) == b"test\0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda texts: texts.shuffle(), "DataConfig.source = 'shuffle': is not for a pipeline that trains"),
        (lambda texts: texts.map(Upper(), is_random=True), "DataConfig.source = 'Upper': is random"),
    ],
)
def test_what_a_run_does_itself_is_refused(change, said):
    with pytest.raises(SettingError, match=said):
        DataConfig(change(Pipeline(Rows([{"text": "a"}]))))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"text": 3}] * 3, "record 0: operator Upper: raises AttributeError"),
        ([{"body": "a"}] * 3, "record 0: operator Upper: there is no field 'text', there are body"),
    ],
)
def test_an_operator_that_raises_ends_the_start_with_its_record(make_loader, tmp_path, records, said):
    config = DataConfig(Pipeline(Rows(records)).map(Upper(), reads=("text",), writes=("text",)))
    for refused in (lambda: find_index(config, tmp_path, print), lambda: make_loader(config)):
        with pytest.raises(SettingError, match=f"DataConfig.source = .*{said}"):
            refused()
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
