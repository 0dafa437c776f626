import subprocess
import sys

import numpy as np
import pytest

from swift.data.config import DataConfig, in_split
from swift.data.index import indexed_stream, make_index
from swift.data.sources import TokenFile, TokenReader
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


@pytest.mark.parametrize(("share", "num_validating"), [(1e-6, 1), (1 - 1e-6, 19)])
def test_either_side_has_a_document_the_one_that_comes_first_with_another_share(share, num_validating):
    names = NAMES[:20]
    validates = in_split(names, "validation", share)
    assert validates.sum() == num_validating
    shares = np.linspace(0.001, 0.999, 999)
    near = next(one for one in (in_split(names, "validation", s) for s in shares) if one.sum() == num_validating)
    assert validates.tolist() == near.tolist()
    assert (validates ^ in_split(names, "train", share)).all()


@pytest.mark.parametrize("share", [0.25, 1e-6, 1 - 1e-6])
def test_a_single_text_is_cut_its_end_for_validation(memory_texts, share):
    text = "".join(chr(33 + number % 90) for number in range(1000))
    config = DataConfig(memory_texts((text,)), validation_share=share)
    train, validation = (bytes(open_stream(config, split).read(0, 10**6)).decode() for split in ("train", "validation"))
    assert train.removesuffix("\0") + validation.removesuffix("\0") == text
    assert validation.endswith("\0")
    assert len(validation) - 1 == {0.25: 250, 1e-6: 1, 1 - 1e-6: 999}[share]


def test_a_token_file_of_one_document_is_cut(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    config = DataConfig(TokenFile(str(tmp_path / "tokens.bin"), vocab_size=100), validation_share=0.2)
    assert open_stream(config, "train").read(0, 200).tolist() == list(range(80))
    assert open_stream(config, "validation").read(0, 200).tolist() == list(range(80, 100))


@pytest.mark.parametrize("num_texts", [1, 3])
def test_validation_has_a_source_of_its_own(memory_texts, tmp_path, num_texts):
    texts = tuple(f"<{number}>" for number in range(num_texts))
    config = DataConfig(memory_texts(texts), validation_source=memory_texts(("last",)))
    assert bytes(open_stream(config, "train").read(0, 99)).decode() == "".join(f"{text}\0" for text in texts)
    assert bytes(open_stream(config, "validation").read(0, 99)) == b"last\0"

    files = [TokenFile(str(tmp_path / name), vocab_size=100) for name in ("train.bin", "validation.bin")]
    for number, file in enumerate(files):
        np.arange(10 * number, 10 * number + 10, dtype="<u2").tofile(file.path)
    config = DataConfig(files[0], validation_source=files[1])
    for number, split in enumerate(("train", "validation")):
        assert open_stream(config, split).read(0, 99).tolist() == list(range(10 * number, 10 * number + 10))
        path = tmp_path / f"index-{split}"
        make_index(config, path, lambda _: None)
        assert (
            indexed_stream(path, config, split).read(0, 99).tolist() == open_stream(config, split).read(0, 99).tolist()
        )


def test_texts_do_not_validate_a_token_file(memory_texts):
    with pytest.raises(SettingError, match=r"DataConfig\.validation_source = .*: must be of the same kind"):
        DataConfig(TokenFile("tokens.bin"), validation_source=memory_texts(("text",)))
