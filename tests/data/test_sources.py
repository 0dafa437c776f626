import gzip
import lzma
import re

import numpy as np
import pytest

from swift.data.config import DataConfig
from swift.data.pipeline import Pipeline
from swift.data.records import JsonLines
from swift.data.sources import BLOCK_TOKENS, DataError, StandardLibrary, TextFiles, TokenFile
from swift.data.stream import open_stream
from swift.errors import SettingError


def test_standard_library():
    documents = StandardLibrary().documents()
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"dataclasses.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or not name.endswith(".py")]
    assert documents[names.index("dataclasses.py")].read().startswith("import re\n")


def test_every_file_of_the_standard_library_can_be_read():
    assert sum(len(document.read()) for document in StandardLibrary().documents()) > 5_000_000


def test_a_python_without_its_library_on_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(SettingError, match=r"DataConfig.source = StandardLibrary\(\): .*holds no .py files.*TextFiles"):
        StandardLibrary().documents()


def test_text_files_are_named_without_the_place_they_lie_in(tmp_path):
    for name in ("b.txt", "a/c.txt", "a/d/e.txt", "a/f.md"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"in {name}\r\n".encode())
    (tmp_path / "corpus" / "directory.txt").mkdir()
    documents = TextFiles(f"{tmp_path}/corpus/**/*.txt").documents()
    assert [document.name for document in documents] == ["a/c.txt", "a/d/e.txt", "b.txt"]
    assert documents[2].read() == "in b.txt\r\n"
    assert [document.name for document in TextFiles(f"{tmp_path}/corpus/b.txt").documents()] == ["b.txt"]


def test_text_files_match_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert [document.read() for document in TextFiles("*.txt").documents()] == ["text"]


def test_text_files_that_do_not_exist_or_are_empty(tmp_path):
    with pytest.raises(SettingError, match=r"TextFiles.pattern = '.*\*.txt': no file matches"):
        TextFiles(f"{tmp_path}/*.txt").documents()
    (tmp_path / "a.txt").touch()
    with pytest.raises(SettingError, match=r"TextFiles.pattern = .*: all files that match \(1\) are empty"):
        TextFiles(f"{tmp_path}/*.txt").documents()


def test_text_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    gone, latin = TextFiles(f"{tmp_path}/*.txt").documents()
    with pytest.raises(SettingError, match=r"TextFiles.pattern = .*: cannot read .*gone.txt: No such file"):
        gone.read()
    with pytest.raises(SettingError, match=r"TextFiles.pattern = .*latin.txt is not UTF-8 text \(byte 2\)"):
        latin.read()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_is_read_by_position(tmp_path, dtype):
    path = tmp_path / "tokens.bin"
    np.arange(100, 200).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(path)
    tokens = TokenFile(str(path), dtype).tokens(256)
    assert tokens.dtype == dtype
    assert len(tokens) == 100
    assert tokens[0:200].tolist() == list(range(100, 200))
    assert tokens[7:9].tolist() == [107, 108]
    assert tokens[:0].tolist() == []


def test_documents_of_a_token_file(monkeypatch):
    tokens = np.array([9, 1, 1, 9, 2, 9, 9, 3])
    monkeypatch.setattr("swift.data.sources._SCAN_TOKENS", 3)
    monkeypatch.setattr("swift.data.sources._SCAN_BLOCKS", 2)

    def ends(source, tokens):
        return np.concatenate(list(source.document_ends(tokens))).tolist()

    assert ends(TokenFile("x", end_of_document=9), tokens) == [1, 4, 6, 7, 8]
    assert ends(TokenFile("x", end_of_document=3), tokens) == [8]
    many = np.zeros(2 * BLOCK_TOKENS + 1, np.uint16)
    assert ends(TokenFile("x"), many) == [BLOCK_TOKENS, 2 * BLOCK_TOKENS, len(many)]
    assert ends(TokenFile("x"), many[:BLOCK_TOKENS]) == [BLOCK_TOKENS]


def test_token_file_errors(tmp_path):
    path = str(tmp_path / "tokens.bin")
    with pytest.raises(SettingError, match=re.escape("TokenFile.dtype = 'int8': must be 'uint16' or 'uint32'")):
        TokenFile(path, "int8")
    with pytest.raises(SettingError, match=r"TokenFile.vocab_size = 0: must be"):
        TokenFile(path, vocab_size=0)
    with pytest.raises(SettingError, match=r"TokenFile.path = .*tokens.bin': cannot be read: No such file"):
        TokenFile(path).tokens(256)
    with pytest.raises(SettingError, match=r"TokenFile.path = .*: cannot be read: Is a directory"):
        TokenFile(str(tmp_path)).tokens(256)
    open(path, "wb").close()
    with pytest.raises(SettingError, match=r"TokenFile.path = .*: the file is empty"):
        TokenFile(path).tokens(256)
    np.arange(3, dtype="<u2").tofile(path)
    with pytest.raises(SettingError, match=r"TokenFile.dtype = 'uint32': .*tokens.bin holds 6 bytes, no multiple of 4"):
        TokenFile(path, "uint32").tokens(256)
    with pytest.raises(SettingError, match=r"TokenFile.end_of_document = 70000: .*tokens.bin holds no such token"):
        list(TokenFile(path, end_of_document=70000).document_ends(TokenFile(path).tokens(256)))


def test_the_default_source_is_the_standard_library():
    assert DataConfig().source == StandardLibrary()


def written(path, write) -> bytes:
    write(path)
    return path.read_bytes()


def test_a_file_of_another_kind_is_no_token_file(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    contents = {
        "NumPy array with a header": written(tmp_path / "a.npy", lambda path: np.save(path, tokens)),
        "a zip archive": written(tmp_path / "a.npz", lambda path: np.savez(path, tokens)),
        "gzip": gzip.compress(tokens.tobytes()),
        "xz": lzma.compress(tokens.tobytes()),
        "llm.c": np.array([20240520, 1, 1000] + [0] * 253, "<i4").tobytes() + tokens.tobytes(),
        "is text": b'{"text": "Once upon a time, there was a queen."}\n' * 20,
    }
    for said, content in contents.items():
        (tmp_path / "tokens.bin").write_bytes(content + bytes(len(content) % 2))
        with pytest.raises(SettingError, match=rf"TokenFile.path = .*tokens.bin': .*{said}"):
            TokenFile(str(tmp_path / "tokens.bin")).tokens(65536)
    for plain in (tokens, np.full(1000, 0x2020, np.uint16), np.arange(35615, 35915, dtype=np.uint16)):
        plain.tofile(tmp_path / "tokens.bin")
        assert TokenFile(str(tmp_path / "tokens.bin")).tokens(65536)[0 : len(plain)].tolist() == plain.tolist()


ODD = {
    b'{"text": null}': r"the field 'text' of a document is null",
    b'{"tokens": null, "text": null}': r"the field 'text' of a document is null",
    b'{"tokens": null}': r"the field 'tokens' of a document is null",
    b'{"txt": "a"}': "a document has no field 'text' or 'tokens', but txt",
    b'{"text": "a\\ud800"}': r"has letter 2, '\\ud800', which is no character",
    b'{"text": 5}': "neither a text nor a list of whole numbers, but a int",
    b'{"text": ["a"]}': "neither a text nor a list of whole numbers, but an array of ",
    b'{"tokens": [1.5]}': "neither a text nor a list of whole numbers, but an array of float64",
    b'{"tokens": [[1], [2]]}': "neither a text nor a list of whole numbers, but an array of int64",
    b'{"tokens": [[1], [2, 3]]}': "neither a text nor a list of tokens: ",
    b'{"tokens": [true]}': "neither a text nor a list of whole numbers, but an array of bool",
    b'{"tokens": [99999999999999999999]}': "neither a text nor a list of whole numbers, but an array of object",
}


def test_a_document_that_is_no_text_is_said_to_be(tmp_path):
    for line, said in ODD.items():
        (tmp_path / "x.jsonl").write_bytes(b'{"text": "ab"}\n{"text": ""}\n{"tokens": null, "text": "c"}\n' + line)
        data = DataConfig(source=Pipeline(JsonLines(f"{tmp_path}/x.jsonl")), validation_share=0.5)
        with pytest.raises(DataError, match=rf"x\.jsonl:4: .*{said}"):
            [open_stream(data, split) for split in ("train", "validation")]
