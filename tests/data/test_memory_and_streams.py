"""Documents in memory, and streams that are read in their order."""

from dataclasses import dataclass

import numpy as np
import pytest

from swift.data.config import DataConfig
from swift.data.corpus import training_pipelines
from swift.data.pipeline import Pipeline
from swift.data.records import Rows
from swift.data.sources import DataError, InMemory
from swift.data.stream import open_stream
from swift.errors import SettingError
from swift.input.profile import profile_input


def expected(documents):
    return [token for document in documents for token in (*document, 0)]


def test_documents_in_memory_are_texts_or_tokens():
    texts = [f"<{number}>" for number in range(40)]
    tokens = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    for split in ("train", "validation"):
        read = [
            open_stream(DataConfig(InMemory(documents), validation_share=0.3), split).read(0, 999).tolist()
            for documents in (texts, tokens)
        ]
        assert read[0] == read[1]
        assert len(read[0]) > 30
    assert repr(InMemory(texts)) == repr(InMemory(tuple(texts))) != repr(InMemory(texts[:39]))


@pytest.mark.parametrize("document", [np.array([3, 256]), np.array([-1])])
def test_a_token_that_is_none_of_the_vocabulary(document):
    config = DataConfig(InMemory(["text", document, document]), validation_share=0.01)
    said = "document-1 holds a token that is not from 0 to 255: set DataConfig.tokenizer to the one that wrote it"
    with pytest.raises(DataError, match=f"^{said}$"):
        open_stream(config, "train")
    with pytest.raises(DataError, match=f"^{said}$"):  # also where a plan is made
        profile_input(*training_pipelines(config))
    rows = Rows([{"tokens": np.array([3])}, {"tokens": document}])
    with pytest.raises(DataError, match=r"^record 1: operator tokenize the documents: the document holds a token"):
        open_stream(DataConfig(Pipeline(rows), validation_share=0.01), "train")


def test_no_documents():
    with pytest.raises(SettingError, match=r"InMemory\.documents = \[\]: must contain at least one document"):
        InMemory([])


@dataclass(frozen=True)
class Counting:
    """Documents of ever the same token: the first has one, the second two, ..."""

    num_documents: int
    num_until_trouble: int = 10**9

    def stream(self, split):
        for number in range(1, self.num_documents + 1):
            if number > self.num_until_trouble:
                raise OSError("the network is down")
            yield np.full(number, number if split == "train" else 200)


def test_a_stream_is_read_in_its_order_and_begins_anew():
    documents = [[number] * number for number in range(1, 8)] * 100
    read = open_stream(DataConfig(Counting(7)), "train").read
    assert read(0, 99).tolist() == expected(documents)[:99]
    for start in (20, 3000, 20, 1500, 90):  # back, and on
        assert read(start, start + 40).tolist() == expected(documents)[start : start + 40]
    fresh = open_stream(DataConfig(Counting(7)), "train").read
    assert fresh(90, 93).tolist() == expected(documents)[90:93]  # as in a resumed run
    assert set(open_stream(DataConfig(Counting(7)), "validation").read(0, 20).tolist()) == {0, 200}


def test_no_more_of_a_stream_is_in_memory_than_may_be_read_again():
    stream = open_stream(DataConfig(Counting(199)), "train")
    stream.keep(5000)
    for start in range(0, 200_000, 100):
        stream.read(start, start + 100)
        assert sum(map(len, stream._recent)) < 5000 + 2 * 64 * 200  # documents come 64 at a time


def test_batches_of_a_stream_are_its_windows_whichever_is_asked_for(make_loader):
    tokens = np.array(expected([[number] * number for number in range(1, 200)]))
    shape = 2, 3, 5  # of batches of 30 tokens
    loader = make_loader(DataConfig(Counting(199)), shape=shape)
    for step in (0, 1, 7, 3):
        batch = loader.batch(step)
        assert batch.inputs.ravel().tolist() == tokens[30 * step : 30 * step + 30].tolist()
        assert batch.labels.ravel().tolist() == tokens[30 * step + 1 : 30 * step + 31].tolist()
        assert batch.valid.all()
    next(loader)
    again = make_loader(DataConfig(Counting(199)), shape=shape)
    assert again.restore(loader.state()) == []
    np.testing.assert_array_equal(next(again).inputs, loader.batch(1).inputs)


class Begun:
    """A stream of short documents that counts how often it is begun."""

    def __init__(self):
        self.count = 0

    def stream(self, split):  # noqa: ARG002
        self.count += 1
        return (np.array([number % 200, number // 200]) for number in range(10_000))


def test_batches_that_may_be_asked_for_again_are_kept(make_loader):
    """Reads as after a failure: from a few batches before the newest one; a restart of the process skips the rest."""
    source, whole = Begun(), make_loader(DataConfig(Begun()), num_kept=1000)
    loader = make_loader(DataConfig(source), num_kept=20)
    for step in (*range(60), 40, *range(41, 60), 600, 581, 600):
        np.testing.assert_array_equal(loader.batch(step).labels, whole.batch(step).labels)
    assert source.count == 1
    np.testing.assert_array_equal(loader.batch(500).labels, whole.batch(500).labels)
    assert source.count == 2
    again = make_loader(DataConfig(source), num_kept=20)
    again.skip_to(600)
    source.stream = None  # what is left is in the loader
    for step in (580, 590, 599):
        np.testing.assert_array_equal(again.batch(step).labels, whole.batch(step).labels)


def test_trouble_with_a_stream_is_told(make_loader):
    with pytest.raises(SettingError, match=r"DataConfig\.source = Counting\(.*: Counting\(.*\) has no documents"):
        make_loader(DataConfig(Counting(0)))
    loader = make_loader(DataConfig(Counting(500, num_until_trouble=200)))
    with pytest.raises(DataError, match=r"Counting\(.*\) cannot be read: OSError: the network is down"):
        loader.batch(10_000)
    with pytest.raises(DataError, match=r"cannot be read any more"):
        loader.batch(10_001)
