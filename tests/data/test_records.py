"""Records of files: as their writer says, by number, with places; changed and damaged ones are refused by name."""

import gc
import gzip
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given
from hypothesis import strategies as st

from swift.data.records import ArrayRecords, Documents, JsonLines, RecordSource, Rows, _lines_of
from swift.data.sources import DataError, TextFiles
from swift.data.tables import DatasetDirectory, ParquetFiles
from swift.errors import SettingError
from swift.files import open_regular

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


def test_a_file_that_two_threads_open_at_once_is_closed_once(folder, monkeypatch):
    """The second descriptor is closed at once; one that is closed twice would be another file's by then."""
    sources, opened, closed = [JsonLines(f"{folder}/a.jsonl")], [], []
    length = len(json_lines(LINES[:1])) - 1

    def read() -> bytes:
        return sources[0]._read(0, 0, length)

    def open_and_let_another_be_first(path):
        fd = open_regular(path)
        opened.append(fd)
        if len(opened) == 1:
            with ThreadPoolExecutor(1) as other:
                assert json.loads(other.submit(read).result()) == LINES[0]
        return fd

    monkeypatch.setattr("swift.data.records.open_regular", open_and_let_another_be_first)
    monkeypatch.setattr(os, "close", lambda fd, close=os.close: (closed.append(fd), close(fd)))
    assert json.loads(read()) == LINES[0]
    assert closed == opened[:1]
    sources.clear()
    gc.collect()
    assert sorted(closed) == sorted(opened)


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


def test_lines_as_other_programs_write_them(tmp_path):
    """Byte-order marks also in the middle, as of files that were joined; Windows' line ends; lines of white space."""
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n \t\n{"a": 2}\n\xef\xbb\xbf\n\xef\xbb\xbf{"a": 3}\r\n\r\n\xef\xbb\xbf'
    (tmp_path / "x.jsonl").write_bytes(content)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(content[:30]) + gzip.compress(content[30:]) + bytes(512))
    for name in ("x.jsonl", "y.jsonl.gz"):
        source = JsonLines(f"{tmp_path}/{name}")
        assert all_of(source) == [{"a": 1}, {"a": 2}, {"a": 3}], name


@given(
    st.lists(st.sampled_from([b"", b"\r", b" ", b"\xef\xbb\xbf", b'{"a": 1}', b' {"a": 2}', b"\t", b"[", b"\0"])),
    st.integers(1, 9),
)
def test_lines_are_found_whatever_pieces_the_file_is_read_in(lines, piece):
    content = b"\n".join(lines)
    told = [content[begin:end] for begin, end in _lines_of(lambda begin, end: content[begin:end], len(content), piece)]
    assert told == [line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip()]


def test_indented_lines_are_read_once():
    """A file whose every line begins with a blank costs no further read of each."""
    content, reads = b'  {"a": 1}\n \n' * 1000, []
    lines = _lines_of(lambda begin, end: reads.append(begin) or content[begin:end], len(content), 5000)
    assert len(lines) == 1000
    assert len(reads) <= 2 * -(-len(content) // 5000)


def test_deep_and_utf_16_lines_are_refused_by_number(tmp_path):
    contents = [b"[" * 99999, b'{"a":' * 99999, '{"a": 1}'.encode("utf-16"), b'{"a": ' + b"9" * 9999 + b"}", b"\0\0"]
    for content in contents:
        (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + content + b"\n")
        with pytest.raises(DataError, match=r"x\.jsonl: record 2 is not JSON: .{1,200}$"):
            JsonLines(f"{tmp_path}/x.jsonl")[1]


def pieces(content: bytes) -> list[bytes]:
    """A file cut short at many places, and with one byte changed at many."""
    cut = [content[:length] for length in range(len(content))]
    flipped = [content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :] for place in range(len(content))]
    return cut + flipped


def outcome(make) -> object:
    """All records of a source; None where it is refused by a line."""
    try:
        return all_of(make())
    except DataError:
        return None


def test_gzip_is_read_as_its_module_does_or_refused(tmp_path):
    whole, path = gzip.compress(json_lines(LINES[:4]), mtime=0) + gzip.compress(b'{"b": 1}', mtime=0), tmp_path / "x.gz"
    for content in pieces(whole):
        path.write_bytes(content)
        try:
            oracle = [json.loads(line) for line in gzip.decompress(content).split(b"\n") if line] if content else None
        except Exception:  # of many kinds
            oracle = None
        assert outcome(lambda: JsonLines(str(path))) == oracle


def test_zstd_of_several_frames_is_whole_or_refused(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path, compressor = tmp_path / "x.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True)
    frames = [compressor.compress(json_lines(LINES[:3])), b"\x50\x2a\x4d\x18\x04\0\0\0mark", compressor.compress(b"")]
    frames.append(compressor.compress(json_lines(LINES[3:])))
    ends = {sum(map(len, frames[:number])): LINES[:3] for number in (1, 2, 3)}  # whole, as far as anybody can tell
    for length in range(sum(map(len, frames)) + 1):
        path.write_bytes(b"".join(frames)[:length])
        told = outcome(lambda: JsonLines(str(path)))
        assert told == (LINES if length == sum(map(len, frames)) else ends.get(length)), length
    path.write_bytes(b"".join(frames) + b"more")
    assert outcome(lambda: JsonLines(str(path))) is None
    path.write_bytes(b"".join(compressor.compress(json_lines([{"a": number}])) for number in range(3000)))
    assert len(JsonLines(str(path))) == 3000


def write_arrow(path, table, **options) -> None:
    arrow = pytest.importorskip("pyarrow")
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, **options)


@pytest.fixture
def dataset(tmp_path):
    """A dataset of two files in a directory with brackets, as ``save_to_disk`` writes it, and what ``map`` leaves."""
    arrow = pytest.importorskip("pyarrow")
    home = tmp_path / "wiki [en]"
    home.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_arrow(home / names[0], arrow.table({"a": [1, 2]}))
    write_arrow(home / names[1], arrow.table({"a": [3, 4]}))
    write_arrow(home / "cache-573212adef6ba623.arrow", arrow.table({"a": [-1, -2, -3]}))
    (home / "dataset_info.json").write_text("{}")
    (home / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return home


def test_a_dataset_has_the_files_that_its_state_names(dataset):
    assert [row["a"] for row in all_of(DatasetDirectory(str(dataset)))] == [1, 2, 3, 4]
    state = (dataset / "state.json").read_text()
    (dataset / "state.json").write_text(state.replace("00000-of", "x").replace("00001-of", "00000-of"))
    with pytest.raises(SettingError, match=r"is not whole: .*data-x-00002.arrow cannot be read: No such file"):
        len(DatasetDirectory(str(dataset)))
    for content in ("{", "[]", "{}", '{"_data_files": []}', '{"_data_files": [{"filename": "../x"}]}', "[" * 99999):
        (dataset / "state.json").write_text(content)
        with pytest.raises(SettingError, match=r"its state\.json does not name its files"):
            len(DatasetDirectory(str(dataset)))
    (dataset / "state.json").write_text(state[:-1] + ', "_indices_data_files": [{"filename": "indices.arrow"}]}')
    with pytest.raises(SettingError, match="rows chosen by another file"):
        len(DatasetDirectory(str(dataset)))


def test_a_dataset_without_a_state_lacks_none_of_its_numbered_files(dataset):
    (dataset / "state.json").unlink()
    assert [row["a"] for row in all_of(DatasetDirectory(str(dataset)))] == [1, 2, 3, 4]
    (dataset / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(SettingError, match=r"is not whole: there is no data-00000-of-00002.arrow"):
        len(DatasetDirectory(str(dataset)))
    (dataset / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(SettingError, match=r"has no \.arrow file"):
        len(DatasetDirectory(str(dataset)))
    (dataset.parent / "dataset_dict.json").write_text("{}")
    with pytest.raises(SettingError, match=r"holds several datasets: name one of its directories wiki \[en\]"):
        len(DatasetDirectory(str(dataset.parent)))


def test_a_damaged_table_never_has_fewer_rows_and_never_ends_the_process(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": [f"row {number}" for number in range(12)], "b": [[number] for number in range(12)]})
    write_arrow(tmp_path / "x.arrow", table, max_chunksize=4)
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=5, write_page_checksum=True)
    (tmp_path / "dataset_info.json").write_text("{}")
    sources = {"x.arrow": lambda: DatasetDirectory(str(tmp_path)), "x.parquet": lambda: ParquetFiles(f"{tmp_path}/*t")}
    for name, make in sources.items():
        whole = (tmp_path / name).read_bytes()
        assert outcome(make) == table.to_pylist()
        for content in pieces(whole)[::17]:
            (tmp_path / name).write_bytes(content)
            rows = outcome(make)
            assert rows is None or (len(rows) == 12 and len(content) == len(whole)), name


def test_columns_of_every_kind_are_as_arrow_says(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = arrow.array(["a", None, "c"])
    columns = {
        "large": texts.cast(arrow.large_string()),
        "dictionary": texts.dictionary_encode(),
        "view": texts.cast(arrow.string_view()),
        "nested": arrow.array([{"x": [1, 2]}, None, {"x": []}]),
        "map": arrow.array([[("a", 1)], [], None], arrow.map_(arrow.string(), arrow.int64())),
        "null": arrow.nulls(3),
    }
    parquet.write_table(arrow.table(columns), tmp_path / "x.parquet", row_group_size=2)
    empty = arrow.table({name: column.slice(0, 0) for name, column in columns.items()})
    parquet.write_table(empty, tmp_path / "w.parquet")
    source = ParquetFiles(f"{tmp_path}/*.parquet")
    assert all_of(source) == arrow.table(columns).to_pylist()
    with pytest.raises(SettingError, match=r"columns = 'txt': .*w.parquet has no such column, but large, "):
        len(ParquetFiles(f"{tmp_path}/*.parquet", columns=("large", "txt")))
    no_text = arrow.Array.from_buffers(arrow.string(), 1, arrow.array([b"\xff"], arrow.binary()).buffers())
    parquet.write_table(arrow.table({"a": no_text}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet:1: its a cannot be read: "):
        ParquetFiles(f"{tmp_path}/x.parquet")[0]
    parquet.write_table(arrow.Table.from_arrays([texts, texts], ["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet has two columns 'a'"):
        len(ParquetFiles(f"{tmp_path}/x.parquet"))


def test_a_name_with_brackets_is_a_name_where_it_is_one(tmp_path):
    for name, number in {"a[1].jsonl": 1, "a1.jsonl": 2}.items():
        (tmp_path / name).write_bytes(json_lines([{"n": number}]))
    assert all_of(JsonLines(f"{tmp_path}/a[1].jsonl")) == [{"n": 1}]
    assert all_of(JsonLines(f"{tmp_path}/a[12].jsonl")) == [{"n": 2}]
    folder = tmp_path / "b [c]"
    folder.mkdir()
    (folder / "x\udcff.txt").write_text("text")
    (folder / "loop").symlink_to(folder)
    assert [one.name for one in TextFiles(f"{folder}/**/*.txt").documents()] == ["x\udcff.txt"]
    assert len(Documents(TextFiles(f"{folder}/*.txt")).digest()) == 64
