import subprocess
import sys

import numpy as np
import pytest

from swift.data import DataConfig, TokenFile
from swift.data.config import in_split
from swift.data.files import TokenReader
from swift.data.stream import open_stream
from swift.errors import SettingError

NAMES = [f"text-{number}" for number in range(400)]


def test_splits_are_disjoint_and_complete():
    train, validation = (in_split(NAMES, split, 0.25) for split in ("train", "validation"))
    assert (train ^ validation).all()
    assert validation.mean() == pytest.approx(0.25, abs=0.06)


def test_a_document_keeps_its_side_whatever_else_the_corpus_holds():
    whole = dict(zip(NAMES, in_split(NAMES, "train", 0.25), strict=True))
    some = NAMES[150:50:-1]
    assert in_split(some, "train", 0.25).tolist() == [whole[name] for name in some]


def test_a_larger_share_keeps_the_documents_of_a_smaller():
    small, large = (in_split(NAMES, "validation", share) for share in (0.1, 0.3))
    assert small.sum() < large.sum()
    assert not (small & ~large).any()


def test_the_side_does_not_depend_on_the_process():
    code = "from swift.data.config import in_split; print(in_split([f'text-{n}' for n in range(40)], 'train', 0.5))"
    output = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == str(in_split(NAMES[:40], "train", 0.5)).split()
    # A changed hash would move documents between the splits of runs that are resumed.
    assert np.flatnonzero(in_split(NAMES[:40], "validation", 0.2)).tolist() == [6, 19, 23, 26, 31, 33, 35, 39]


def test_streams_hold_whole_documents_with_separators(memory_texts):
    texts = tuple(f"<{number}>" * (number % 4) for number in range(40))
    train, validation = (
        bytes(open_stream(DataConfig(memory_texts(texts), validation_share=0.3), split).read(0, 10**6))
        for split in ("train", "validation")
    )
    assert train.endswith(b"\0")
    assert validation.endswith(b"\0")
    documents = [stream.decode().split("\0")[:-1] for stream in (train, validation)]
    in_order = [[text for text in texts if text and text in side] for side in documents]
    assert documents == in_order
    assert sorted(documents[0] + documents[1]) == sorted(filter(None, texts))
    assert not set(documents[0]) & set(documents[1])


def test_a_token_file_is_split_by_document(tmp_path):
    documents = [[number] * (number % 5) + [999] for number in range(200)]
    np.concatenate(documents).astype("<u2").tofile(tmp_path / "tokens.bin")
    source = TokenFile(str(tmp_path / "tokens.bin"), end_of_document=999, vocab_size=1000)
    config = DataConfig(source, validation_share=0.3)
    for split in ("train", "validation"):
        stream = open_stream(config, split)
        members = in_split(map(str, range(200)), split, 0.3)
        chosen = [document for document, member in zip(documents, members, strict=True) if member]
        expected = [token for document in chosen for token in document]
        assert isinstance(stream.tokens_N, TokenReader)
        assert stream.num_tokens == len(expected)
        assert stream.read(0, stream.num_tokens).tolist() == expected
        assert [stream.read(i, i + 7).tolist() for i in range(len(expected))] == [
            expected[i : i + 7] for i in range(len(expected))
        ]


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, float("nan")])
def test_a_share_outside_its_range(share):
    with pytest.raises(SettingError, match=r"DataConfig.validation_share = .*: must be more than 0 and less than 1"):
        DataConfig(validation_share=share)


@pytest.mark.parametrize(("share", "side", "bound"), [(1e-6, "validation", "more than"), (1 - 1e-6, "train", "less")])
def test_an_empty_side_is_refused_with_a_share_that_works(share, side, bound):
    names = NAMES[:20]
    with pytest.raises(SettingError, match=f"leaves none of 20 documents for {side}: use {bound}") as caught:
        in_split(names, "train", share)
    working = float(str(caught.value).split(" than ")[1].split(",")[0]) + (1e-5 if side == "validation" else -1e-5)
    assert in_split(names, "train", working).sum() == (19 if side == "validation" else 1)


def test_a_single_document_cannot_be_split():
    with pytest.raises(SettingError, match=r"DataConfig.validation_share = 0.5: the data are a single document"):
        in_split(["alone"], "train", 0.5)
