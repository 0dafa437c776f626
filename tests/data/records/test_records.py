"""Records of files: as their writer says, by number, with places; changed and damaged ones are refused by name."""

import gzip
import json
import pickle

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from swift.data import DataError, TextFiles
from swift.data.records import ArrayRecords, DatasetDirectory, Documents, JsonLines, ParquetFiles, RecordSource, Rows
from swift.errors import SettingError

LINES = [{"text": f"line {number}", "id": number, "tags": ["a", "b"]} for number in range(7)]


def json_lines(records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(LINES[:3]) + b"\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + json_lines(LINES[3:5])))
    (tmp_path / "c.jsonl").write_bytes(json_lines(LINES[5:]).rstrip())
    return tmp_path


def all_of(source: RecordSource) -> list:
    return [dict(source[number]) for number in range(len(source))]


def test_lines_of_all_files_by_name_compressed_or_not(folder):
    source = JsonLines(f"{folder}/*.jsonl*")
    assert all_of(source) == LINES
    assert source[5] == LINES[5]
    assert source.place(0) == f"{folder}/a.jsonl:1"
    assert source.place(4) == f"{folder}/b.jsonl.gz:2"
    assert all_of(pickle.loads(pickle.dumps(source))) == LINES
    assert isinstance(source, RecordSource)


def test_a_digest_differs_if_a_file_does(folder):
    digest = JsonLines(f"{folder}/*.jsonl*").digest()
    assert digest == JsonLines(f"{folder}/*.jsonl*").digest()
    (folder / "a.jsonl").write_bytes(json_lines(LINES[1:3]))
    assert digest != JsonLines(f"{folder}/*.jsonl*").digest()
    assert Rows([*LINES[:1], {"a": np.ones(2)}]).digest() is None  # of a list in a field nothing is known
    rows = [Rows([{"a": np.ones(2, dtype)}]).digest() for dtype in (np.float32, np.float64, np.float32)]
    assert rows[0] == rows[2] != rows[1]


def test_a_file_that_changes_while_it_is_read_is_refused(folder):
    for name in ("a.jsonl", "b.jsonl.gz"):
        source = JsonLines(f"{folder}/{name}")
        assert len(source) > 1
        source.__dict__.pop("_parts", None)  # as where other files were read since
        (folder / name).write_bytes((folder / name).read_bytes()[:-4])
        with pytest.raises(DataError, match=rf"{name} has changed since the source was opened: it had \d+ bytes"):
            source[1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl: record 2 is not JSON: "),
        ("x.jsonl", b'{"a": 1}\n[2]\n', "x.jsonl: record 2 is not a JSON object"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "x.jsonl: record 2 is not JSON: "),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n{"a": 1}\n', mtime=0)[:-9], "x.jsonl.gz is damaged: "),
    ],
)
def test_a_damaged_file_is_named_with_the_record(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path}/{said}"):
        all_of(JsonLines(f"{tmp_path}/*"))


def test_a_pattern_without_files_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"JsonLines.pattern = .*: no file matches"):
        len(JsonLines(f"{tmp_path}/*.jsonl"))
    with pytest.raises(SettingError, match=r"DatasetDirectory.pattern = .*: is not a directory written by"):
        len(DatasetDirectory(str(tmp_path)))


def test_texts_are_records_with_their_names(folder):
    source = Documents(TextFiles(f"{folder}/?.jsonl"))
    assert [record["name"] for record in all_of(source)] == ["a.jsonl", "c.jsonl"]
    assert source[1]["text"] == json_lines(LINES[5:]).rstrip().decode()
    assert source.place(1) == f"{folder}/c.jsonl"
    assert source.digest() == Documents(TextFiles(f"{folder}/?.jsonl")).digest()


def test_array_records(tmp_path):
    for number in range(2):
        writer = ArrayRecordWriter(str(tmp_path / f"{number}.array_record"), "group_size:1")
        for record in (b"one", b"", b"three"):
            writer.write(record + bytes([number]))
        writer.close()
    source = ArrayRecords(f"{tmp_path}/*.array_record")
    assert [record["record"] for record in all_of(source)] == [b"one\0", b"\0", b"three\0", b"one\1", b"\1", b"three\1"]
    assert source.place(3) == f"{tmp_path}/1.array_record:1"
    assert len(pickle.loads(pickle.dumps(source))) == 6
    (tmp_path / "2.array_record").write_bytes(b"no records")
    with pytest.raises(DataError, match=r"2.array_record is not an ArrayRecord file: "):
        len(ArrayRecords(f"{tmp_path}/*.array_record"))


def without(monkeypatch, module: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)


def test_the_extra_that_is_missing_is_named(tmp_path, monkeypatch):
    without(monkeypatch, "pyarrow")
    without(monkeypatch, "zstandard")
    for name in ("x.parquet", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(SettingError, match=r"ParquetFiles.pattern = .*: needs the extra 'parquet': pip install "):
        len(ParquetFiles(f"{tmp_path}/*.parquet"))
    with pytest.raises(SettingError, match=r"JsonLines.pattern = .*: needs the extra 'zstd': pip install "):
        len(JsonLines(f"{tmp_path}/*.zst"))


def test_zstd(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(json_lines(LINES)))
    assert all_of(JsonLines(f"{tmp_path}/*.zst")) == LINES
    (tmp_path / "x.jsonl.zst").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"x.jsonl.zst is damaged: "):
        len(JsonLines(f"{tmp_path}/*.zst"))


def test_tables(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(LINES)
    for number in range(2):
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    assert all_of(ParquetFiles(f"{tmp_path}/*.parquet")) == LINES * 2
    assert ParquetFiles(f"{tmp_path}/*.parquet", columns=("id",))[9] == {"id": 2}
    (tmp_path / "dataset_info.json").write_text("{}")
    path = str(tmp_path / "data-00000-of-00001.arrow")
    with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    source = DatasetDirectory(str(tmp_path))
    assert all_of(source) == LINES
    assert source.place(4) == f"{tmp_path}/data-00000-of-00001.arrow:5"
    (tmp_path / "0.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"0.parquet is not a Parquet file: "):
        len(ParquetFiles(f"{tmp_path}/*.parquet"))


def test_a_document_that_changes_after_it_was_found_is_refused_by_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("text")
    source = Documents(TextFiles(f"{tmp_path}/*.txt"))
    digest = source.digest()
    assert source[1] == {"name": "b.txt", "text": "text"}
    (tmp_path / "b.txt").write_text("another text")
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert one[0]["text"] == "text"
        with pytest.raises(DataError, match=r"b\.txt has changed since .* it had 4 bytes, and has 12"):
            one[1]
    assert Documents(source.source).digest() != digest == source.digest()
