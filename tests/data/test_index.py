"""A corpus is read once; what is found again is the same to the last token, and of this very corpus."""

import os
import shutil
import threading
import time
import tracemalloc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from swift.data import index as cache_module
from swift.data.config import DataConfig
from swift.data.index import corpus_stream, find_index, indexed_stream, is_intact
from swift.data.loader import Loader
from swift.data.sources import Document, TextFiles, TokenFile, TokenOutOfRange, TokenReader
from swift.data.stream import open_stream, spans_of

LONG_AGO = 1_000_000_000


@pytest.fixture
def texts(tmp_path):
    """Twenty texts, one of which is empty."""
    directory, random = tmp_path / "corpus", np.random.default_rng(0)
    directory.mkdir()
    for number in range(20):
        write(directory / f"{number}.txt", "".join(random.choice(list("abc \n"), 50 * number)).encode())
    return DataConfig(TextFiles(str(directory / "*.txt")), validation_share=0.3)


@pytest.fixture
def tokens(tmp_path):
    """A file of tokens, in which 0 ends a document."""
    write(tmp_path / "tokens.bin", np.random.default_rng(1).integers(0, 9, 5000, np.uint16).tobytes())
    return DataConfig(TokenFile(str(tmp_path / "tokens.bin"), end_of_document=0, vocab_size=9), validation_share=0.3)


@pytest.fixture(params=["texts", "tokens"])
def config(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def write(path, content, age_s=0):
    path.write_bytes(content)
    os.utime(path, (LONG_AGO - age_s,) * 2)


def find(config, cache, **more):
    """The index, and what was said."""
    said = []
    return find_index(config, cache, said.append, **more), said


def files_of(path):
    return {file.name: file.stat().st_mtime_ns for file in path.iterdir()}


def same(path, config):
    for split in ("train", "validation"):
        found, cut = indexed_stream(path, config, split), open_stream(config, split)
        assert found.num_tokens == cut.num_tokens > 0
        np.testing.assert_array_equal(found.read(0, found.num_tokens), cut.read(0, cut.num_tokens))
        assert found.read(0, 9).dtype == cut.read(0, 9).dtype
        assert (found.checksum(), found.digest(), found.file) == (cut.checksum(), cut.digest(), cut.file)
    return True


def test_streams_of_an_index_are_those_of_the_corpus_and_nobody_else_may_read_it(config, cache):
    path, said = find(config, cache)
    assert same(path, config)
    assert said == []
    assert path.stat().st_mode & 0o077 == 0
    assert find(config, cache) == (path, [])


def test_the_second_start_reads_no_text(texts, cache, monkeypatch):
    path, _ = find(texts, cache)
    before = files_of(path)

    def refuse(*_):
        raise AssertionError("a text is read again")

    monkeypatch.setattr(TextFiles, "_read", refuse)
    assert find(texts, cache) == (path, [])
    assert files_of(path) == before
    assert indexed_stream(path, texts, "train").num_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: write(directory / "3.txt", b"x" * 150, age_s=5),
        lambda directory: write(directory / "3.txt", b"longer" * 99),
        lambda directory: write(directory / "new.txt", b"new"),
        lambda directory: (directory / "3.txt").unlink(),
        lambda directory: (directory / "3.txt").rename(directory / "4x.txt"),
    ],
)
def test_another_corpus_has_another_index(texts, tmp_path, cache, change):
    path, _ = find(texts, cache)
    change(tmp_path / "corpus")
    other, _ = find(texts, cache)
    assert same(other, texts)
    assert other != path


def test_other_settings_have_another_index(texts, tokens, cache):
    paths = [
        find(one, cache)[0]
        for one in (
            texts,
            replace(texts, validation_share=0.2),
            tokens,
            replace(tokens, source=replace(tokens.source, end_of_document=1)),
            replace(tokens, source=replace(tokens.source, vocab_size=10)),
        )
    ]
    assert len(set(paths)) == 5


def test_tokens_beyond_a_smaller_vocabulary_are_found_at_the_start_though_there_is_an_index(tmp_path, cache):
    numbers = np.random.default_rng(1).integers(0, 9, 2**20, np.uint16)
    numbers[100_001] = 300  # in no sample
    write(tmp_path / "tokens.bin", numbers.tobytes())
    wide = DataConfig(TokenFile(str(tmp_path / "tokens.bin"), end_of_document=0, vocab_size=301))
    narrow = replace(wide, source=replace(wide.source, vocab_size=9))
    assert same(find(wide, cache)[0], wide)
    with pytest.raises(TokenOutOfRange, match="holds token 300"):
        corpus_stream(narrow, "train", find(narrow, cache)[0])


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "head", "nothing is left"])
def test_an_index_that_is_damaged_is_made_anew(config, cache, damage):
    path, _ = find(config, cache)
    content = bytearray((path / "train").read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        (path / "validation").unlink()
    elif damage == "head":
        (path / "index.json").write_text("{}")
    elif damage == "nothing is left":
        shutil.rmtree(path)
    else:
        (path / "train").write_bytes(content if damage == "flip" else content[:-8])
    assert not is_intact(path, 0)
    assert find(config, cache) == (path, [])
    assert is_intact(path, 0)
    assert same(path, config)


def test_a_corpus_that_was_just_written_is_read_again(texts, tmp_path, cache):
    """Within the grain of a file's time it could be another of the same size."""
    path, _ = find(texts, cache)
    os.utime(tmp_path / "corpus" / "3.txt")
    now, _ = find(texts, cache)
    before = files_of(now)
    assert now != path
    assert find(texts, cache)[0] == now
    assert files_of(now) != before


@contextmanager
def being_made(path, *, beats):
    """Pretends that another process is making an index."""
    path.parent.mkdir(exist_ok=True)
    lock = path.with_suffix(".lock")
    with cache_module._alone(lock) as is_alone:
        assert is_alone
        half = path.with_name(f".{path.name}.half")
        half.mkdir()
        if beats:
            with cache_module._heartbeat(lock):
                yield half
        else:
            yield half


def test_who_waits_finds_what_another_has_made(texts, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_BEAT_S", 0.05)
    path, _ = find(texts, cache)
    ready = path.rename(tmp_path / "ready")
    with being_made(path, beats=True):
        found = []
        thread = threading.Thread(target=lambda: found.append(find(texts, cache, patience_s=0.5)))
        thread.start()
        time.sleep(1.0)
        assert found == []  # as long as the other lives
        before = files_of(ready)
        ready.rename(path)
        thread.join(10)
    assert found == [(path, [])]
    assert files_of(path) == before


def test_nobody_waits_for_the_frozen_or_the_dead(texts, cache):
    path, _ = find(texts, cache)
    shutil.rmtree(path)
    with being_made(path, beats=False) as half:
        assert find(texts, cache, patience_s=0.3)[0] == path
        assert same(path, texts)
        assert half.exists()  # the other may wake up
        shutil.rmtree(path)
    assert find(texts, cache, patience_s=100)[0] == path  # its lock is free, and nothing of it is left
    assert not half.exists()


def test_without_room_for_an_index_everybody_reads_for_himself(texts, tmp_path):
    (tmp_path / "cache").write_text("a file")
    path, (line,) = find(texts, tmp_path / "cache" / "corpora")
    assert path is None
    assert line.startswith(f"the corpus is not kept in {tmp_path}/cache/corpora (Not a directory)")


def test_an_index_is_read_where_nobody_can_write(texts, cache, monkeypatch):
    path, _ = find(texts, cache)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("swift.data.index.os.utime", refuse)
    assert find(texts, cache) == (path, [])


def test_texts_of_an_unknown_source_are_not_kept(cache):
    class Own:
        def documents(self):
            return [Document(str(number), lambda: "text") for number in range(9)]

    assert find(DataConfig(Own(), validation_share=0.3), cache) == (None, [])


def test_an_index_that_nobody_uses_is_removed(texts, cache):
    path, _ = find(texts, cache)
    old = cache / "0ld"
    shutil.copytree(path, old)
    os.utime(old, (LONG_AGO,) * 2)
    find(texts, cache)
    assert path.exists()
    assert not old.exists()


def test_a_large_token_file_is_never_held_whole(tmp_path, monkeypatch):
    """A sparse file of 2 GB: the largest read, and all memory at once, are a small part of it."""
    path, longest = tmp_path / "tokens.bin", 0
    with path.open("wb") as file:
        file.truncate(2 * 10**9)
    read = TokenReader._read

    def noted(self, start, stop):
        nonlocal longest
        longest = max(longest, stop - start)
        return read(self, start, stop)

    monkeypatch.setattr(TokenReader, "_read", noted)
    config = DataConfig(TokenFile(str(path), vocab_size=2))
    tracemalloc.start()
    try:
        index = find_index(config, tmp_path / "cache", print)
        loader = Loader(
            config, "train", num_microbatches=1, sequences_per_microbatch=4, sequence_length=64, seed=0, corpus=index
        )
        assert loader.batch(1000).valid.all()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert longest <= 16384
    assert most < 5 * 2**20


def test_a_single_token_leaves_nothing_for_validation(tokens):
    split = spans_of(tokens, [np.array([1])])
    assert [(one.starts_S.tolist(), one.num_tokens) for one in split.values()] == [([0], 1), ([], 0)]


def test_ends_of_documents_come_in_pieces(tmp_path, monkeypatch):
    """Spans that are found piece by piece are those of the whole."""
    tokens = np.random.default_rng(3).integers(0, 5, 4000, np.uint16)
    tokens[-1] = 1
    write(tmp_path / "t.bin", tokens.tobytes())
    source = TokenFile(str(tmp_path / "t.bin"), end_of_document=0, vocab_size=5)
    config = DataConfig(source, validation_share=0.4)
    whole = spans_of(config, [np.concatenate(list(source.document_ends(tokens)))])
    monkeypatch.setattr("swift.data.sources._SCAN_TOKENS", 7)
    pieces = list(source.document_ends(tokens))
    assert len(pieces) > 100
    held = list[weakref.ref]()

    def one_by_one():
        for piece in map(np.copy, pieces):
            held.append(weakref.ref(piece))
            yield piece
            assert sum(one() is not None for one in held) <= 2, "documents are held"

    parts = spans_of(config, one_by_one())
    for split in ("train", "validation"):
        for one, other in zip(parts[split], whole[split], strict=True):
            np.testing.assert_array_equal(one, other)
    assert parts["train"].num_tokens + parts["validation"].num_tokens == len(tokens)
