"""Table rows as records: Parquet files and Hugging Face ``datasets`` directories. Needs the extra ``parquet``."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.data.records import FileRecords, Parts, RecordFile, state_of
from swift.data.sources import DataError
from swift.errors import SettingError, first_line
from swift.files import read_regular

_CONTINUES = b"\xff" * 4
_END = _CONTINUES + bytes(4)
"""First bytes of each message in an Arrow stream, and the stream's end marker."""


def _arrow(setting: str, value: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        allowed = "needs the extra 'parquet': pip install 'swift-moe[parquet]'"
        raise SettingError(setting, value, allowed) from None
    return pyarrow


@dataclass(frozen=True)
class ParquetFiles(FileRecords):
    """Rows of Parquet files as records; the fields are the columns. Needs the extra ``parquet``.

    Whole row groups are read, and the most recently used ones stay in memory.

    Args:
        pattern: pattern of the files, such as ``corpus/*.parquet``; may be remote.
        columns: columns to read; None for all.
    """

    columns: tuple[str, ...] | None = None

    def _num_records(self, file: int) -> int:
        return int(self._group_ends[file][-1]) if len(self._group_ends[file]) else 0

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        ends = self._group_ends[file]
        group = int(np.searchsorted(ends, number, side="right"))
        table = self._groups[file, group]
        return _row(table, number - (int(ends[group - 1]) if group else 0), f"{self.files[file].path}:{number + 1}")

    @functools.cached_property
    def _group_ends(self) -> list[np.ndarray]:
        """Row numbers at which the row groups of each file end."""
        _arrow("ParquetFiles.pattern", self.pattern)
        ends = []
        for record_file in self.files:
            opened = self._opened(record_file)
            head, names = opened.metadata, opened.schema_arrow.names
            _check_names(record_file.path, names)
            for name in self.columns or ():
                if name not in names and name.partition(".")[0] not in names:  # a.b is field b of column a
                    allowed = f"{record_file.path} has no such column, but {', '.join(names) or 'none'}"
                    raise SettingError("ParquetFiles.columns", name, allowed)
            ends.append(np.cumsum([head.row_group(place).num_rows for place in range(head.num_row_groups)]))
        return ends

    @functools.cached_property
    def _groups(self) -> Parts:
        return Parts(lambda part: self._read(*part))

    def _read(self, file: int, group: int) -> Any:
        record_file = self.files[file]
        record_file.check()
        columns = None if self.columns is None else list(self.columns)
        try:
            table = self._opened(record_file).read_row_group(group, columns=columns)
        except _mistakes() as error:
            raise DataError(f"{record_file.path}: row group {group} cannot be read: {first_line(error)}") from error
        record_file.check()  # the file may have been replaced while it was read
        return table

    def _opened(self, file: RecordFile) -> Any:
        arrow = _arrow("ParquetFiles.pattern", self.pattern)
        import pyarrow.parquet

        try:
            source = arrow.BufferReader(file.content()) if file.is_remote else file.path
            return pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
        except _mistakes() as error:
            raise DataError(f"{file.path} is not a Parquet file: {first_line(error)}") from error


@dataclass(frozen=True)
class DatasetDirectory(FileRecords):
    """Rows of a directory written by ``Dataset.save_to_disk`` (Hugging Face ``datasets``), as records.

    The fields are the columns. Values other than text, numbers and lists are returned as Arrow stores them. Needs the
    extra ``parquet``.

    Args:
        pattern: path of the directory.
    """

    @functools.cached_property
    def files(self) -> tuple[RecordFile, ...]:
        """The Arrow files that belong to the dataset, in the order of ``state.json``.

        The directory may hold other files: ``Dataset.map`` caches its results next to its input.
        """
        home = Path(self.pattern)
        if not (home / "dataset_info.json").is_file():
            reason = "is not a directory written by Dataset.save_to_disk: it has no dataset_info.json"
            if (home / "dataset_dict.json").is_file():
                inside = sorted(path.parent.name for path in home.glob("*/dataset_info.json"))
                reason = f"holds several datasets: name one of its directories {', '.join(inside)}"
            raise SettingError("DatasetDirectory.pattern", self.pattern, reason)
        names = self._stated() if (home / "state.json").exists() else self._numbered()
        try:
            return tuple(RecordFile(str(home / name), state_of(str(home / name))) for name in names)
        except OSError as error:
            reason = f"is not whole: {error.filename or 'one of its files'} cannot be read: {error.strerror}"
            raise SettingError("DatasetDirectory.pattern", self.pattern, reason) from error

    def _stated(self) -> list[str]:
        """Returns the file names that ``state.json`` lists."""
        path = Path(self.pattern) / "state.json"
        try:
            state = json.loads(read_regular(path).decode("utf-8-sig"))
            names = [entry["filename"] for entry in state["_data_files"]]
            is_plain = names and all(isinstance(name, str) and Path(name).name == name for name in names)
        except OSError as error:
            raise SettingError("DatasetDirectory.pattern", self.pattern, f"its state.json: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError):
            is_plain = False
        if not is_plain:
            raise SettingError("DatasetDirectory.pattern", self.pattern, "its state.json does not name its files")
        if state.get("_indices_data_files"):  # versions before 1.7 stored which rows to read, and in which order
            text = "is of an early version of datasets, with its rows chosen by another file: save it with a newer one"
            raise SettingError("DatasetDirectory.pattern", self.pattern, text)
        return names

    def _numbered(self) -> list[str]:
        """Returns the file names if there is no ``state.json``, without the cache files that ``datasets`` leaves."""
        names = sorted(path.name for path in Path(self.pattern).glob("[!.]*.arrow"))
        names = [name for name in names if not name.startswith(("cache-", "indices-", "tmp"))]
        if not names:
            raise SettingError("DatasetDirectory.pattern", self.pattern, "has no .arrow file")
        numbered = [re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.arrow", name) for name in names]
        expected = {f"{m[1]}-{n:05}-of-{m[3]}.arrow" for m in numbered if m for n in range(int(m[3]))}
        missing = sorted(expected - set(names))
        if missing:
            raise SettingError("DatasetDirectory.pattern", self.pattern, f"is not whole: there is no {missing[0]}")
        return names

    def _num_records(self, file: int) -> int:
        return int(self._tables[file].num_rows)

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        self.files[file].check()
        return _row(self._tables[file], number, f"{self.files[file].path}:{number + 1}")

    @functools.cached_property
    def _tables(self) -> list[Any]:
        """The tables, memory-mapped and read on demand."""
        arrow = _arrow("DatasetDirectory.pattern", self.pattern)
        tables = []
        for record_file in self.files:
            try:
                file = arrow.memory_map(record_file.path)
                tables.append(arrow.ipc.open_stream(file).read_all())
            except _mistakes() as error:
                raise DataError(f"{record_file.path} is not an Arrow file: {first_line(error)}") from error
            _check_names(record_file.path, tables[-1].column_names)
            # Arrow treats the end of the file as the end of the stream: a file cut between batches looks complete.
            ends = [
                file.read_at(len(part), place) for part, place in ((_CONTINUES, 0), (_END, file.tell() - len(_END)))
            ]
            if ends[0] == _CONTINUES and ends[1] != _END:
                raise DataError(f"{record_file.path} is damaged: it ends before its last row")
        return tables


def _mistakes() -> tuple[type[Exception], ...]:
    """Returns the exceptions that Arrow raises for unreadable files."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError, KeyError)


def _check_names(path: str, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}: fields have names of their own")


def _row(table: Any, row: int, place: str) -> dict[str, Any]:
    """Returns the fields of a row as Python values."""
    from pyarrow import types

    fields = dict[str, Any]()
    for name in table.column_names:
        try:
            column = table[name].slice(row, 1)
            if not (types.is_primitive(column.type) or types.is_dictionary(column.type)):
                column.validate(full=True)  # wrong offsets in a damaged file would crash the process
            fields[name] = column[0].as_py()
        except Exception as error:  # of many types: text that is not UTF-8, dates that Python cannot represent
            raise DataError(f"{place}: its {name} cannot be read: {first_line(error)}") from error
    return fields
