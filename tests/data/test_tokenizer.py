import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError


@given(st.text())
def test_bytes_give_the_text_back(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(tokens) == text


def test_what_is_no_text_is_decoded_to_the_replacement_character():
    # 321 is 65 modulo 256: it must not come back as "A".
    assert ByteTokenizer().decode(np.array([72, 0xC3, 105, 321, -1, 33])) == "H\ufffdi\ufffd\ufffd!"


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingError, match=r"TokenizerFile.path = .*x.json.*extra 'tokenizers': pip install"):
        TokenizerFile(str(tmp_path / "x.json")).encode("a")


@pytest.fixture
def word_file(tmp_path):
    """A vocabulary of words in which number 3 is left out."""
    pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "one": 1, "two": 2, "four": 4, "?": 5}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    path = tmp_path / "words.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_a_tokenizers_file(word_file):
    tokenizer = TokenizerFile(word_file)
    assert tokenizer.encode("two four five").tolist() == [2, 4, 5]
    assert tokenizer.decode(np.array([1, 2], np.int32)) == "one two"
    assert (tokenizer.vocab_size, tokenizer.separator) == (6, 0)
    assert tokenizer == TokenizerFile(word_file)


def test_a_tokenizers_file_without_the_separator(word_file):
    with pytest.raises(SettingError, match=r"TokenizerFile.end_of_document = '</s>': .*words.json has no such token"):
        _ = TokenizerFile(word_file, end_of_document="</s>").separator


def test_files_that_are_no_tokenizers_file(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(SettingError, match=re.escape("TokenizerFile.path = 'no.json': cannot be read")):
        TokenizerFile("no.json").encode("a")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SettingError, match=r"TokenizerFile.path = .*bad.json': is not a tokenizers file"):
        TokenizerFile(str(tmp_path / "bad.json")).encode("a")


def test_truncation_and_padding_that_a_file_asks_for_have_no_part_in_documents(word_file, tmp_path):
    """transformers saves what its last call had asked for."""
    document = json.loads(Path(word_file).read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    document["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (tmp_path / "asks.json").write_text(json.dumps(document), encoding="utf-8-sig")
    asks = TokenizerFile(str(tmp_path / "asks.json"))
    assert asks.encode("two four two").tolist() == TokenizerFile(word_file).encode("two four two").tolist() == [2, 4, 2]
    assert asks.digest() == TokenizerFile(word_file).digest()
    assert json.loads(asks.to_json())["truncation"] is None
