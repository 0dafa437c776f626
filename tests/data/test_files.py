"""Paths that are no regular files are refused by name, and 32-bit tokens are not taken for 16-bit ones."""

import os
import re
import socket
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.data.sources import StandardLibrary, TextFiles, TokenFile, are_halves
from swift.data.tokenizer import TokenizerFile
from swift.errors import SettingError
from swift.files import open_regular

NO_FILES = {"pipe": "a named pipe", "socket": "a socket", "device": "a device"}


def make(kind, path):
    """Makes something at a path that is no regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize(("kind", "name"), NO_FILES.items())
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = make(kind, tmp_path.relative_to(tmp_path) / "x.txt")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SettingError, match=f"pattern = .*: cannot read x.txt: it is {name}, not a regular file"):
        TextFiles("*.txt").documents()
    with pytest.raises(SettingError, match=f"TokenFile.path = 'x.txt': cannot be read: it is {name}, not a regular"):
        TokenFile(str(path)).tokens(256)


@pytest.mark.parametrize(("kind", "name"), NO_FILES.items())
def test_a_tokenizer_that_is_no_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, kind, name):
    monkeypatch.setitem(sys.modules, "tokenizers", ModuleType("tokenizers"))  # which need not be installed for this
    monkeypatch.chdir(tmp_path)
    make(kind, tmp_path.relative_to(tmp_path) / "x.json")
    with pytest.raises(SettingError, match=f"path = 'x.json': cannot be read: it is {name}, not a regular file"):
        TokenizerFile("x.json").encode("a")


def test_a_text_that_becomes_a_pipe_before_it_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    (document,) = TextFiles(str(path)).documents()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SettingError, match=r"cannot read .*a.txt: it is a named pipe"):
        document.read()


def test_a_path_that_becomes_a_pipe_while_it_is_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("swift.files.check_regular", lambda _: None)
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(tmp_path / "pipe")


def test_a_token_file_of_odd_length(tmp_path):
    (tmp_path / "t.bin").write_bytes(bytes(7))
    with pytest.raises(SettingError, match=r"TokenFile.dtype = 'uint16': .*t.bin holds 7 bytes, no multiple of 2"):
        TokenFile(str(tmp_path / "t.bin")).tokens(256)


@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
def test_32_bit_tokens_are_not_read_as_16_bit_ones(tmp_path, vocab_size):
    path = str(tmp_path / "t.bin")
    np.random.default_rng(0).integers(0, vocab_size, 1_000_000).astype("<u4").tofile(path)
    assert len(TokenFile(path, "uint32", vocab_size=vocab_size).tokens(vocab_size)) == 1_000_000
    with pytest.raises(SettingError, match=re.escape("TokenFile.dtype = 'uint16'") + ".*set it to 'uint32'"):
        TokenFile(path, vocab_size=vocab_size).tokens(vocab_size)


@given(st.integers(2, 2**32), st.integers(0, 2**32), st.integers(256, 2000))
def test_all_32_bit_tokens_are_found(vocab_size, seed, count):
    tokens = np.random.default_rng(seed).integers(0, vocab_size, count).astype("<u4")
    low = tokens.view("<u2")[0::2]
    assert are_halves(tokens.view("<u2"), vocab_size) == ((low > (vocab_size - 1) >> 16).sum() >= 64)


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 0.8]), st.integers(2, 1000), st.floats(0.0, 0.99))
def test_16_bit_tokens_with_padding_are_not_taken_for_32_bit_ones(seed, zeros, length, padding):
    """Documents of which up to 8 in 10 tokens are 0, and up to 99 % of the length is padding with zeros."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 60_000, (-(-8000 // length), length)).astype("<u2")
    tokens[random.random(tokens.shape) < zeros] = 0
    used = np.maximum(2, random.integers(0, length, (len(tokens), 1)) * (1 - padding))
    tokens[np.arange(length) >= used] = 0
    assert not are_halves(tokens.ravel(), 60_000)


def test_bytes_with_separators_and_padding_are_not_taken_for_32_bit_tokens():
    texts = [document.read().encode()[:999] for document in StandardLibrary().documents()[:200]]
    for width in (1000, 1001, 2048):
        padded = np.concatenate([np.frombuffer(text.ljust(width, b"\0"), np.uint8) for text in texts]).astype("<u2")
        assert not are_halves(padded, 256)
    assert not are_halves(np.zeros(10_000, "<u2"), 256)
