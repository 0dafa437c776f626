"""Records of tables: Parquet files, and directories of Hugging Face's ``datasets``. Needs the extra ``parquet``."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.data.files import DataError
from swift.data.records.files import FileRecords, Parts, RecordFile, find_files
from swift.errors import SettingError, first_line


def _arrow(setting: str, value: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        allowed = "needs the extra 'parquet': pip install 'swift-moe[parquet]'"
        raise SettingError(setting, value, allowed) from None
    return pyarrow


@dataclass(frozen=True)
class ParquetFiles(FileRecords):
    """Parquet files: a record is a row, and its fields are the columns. Needs the extra ``parquet``.

    A row group is read whole, and the newest ones are kept.

    Args:
        pattern: pattern of the files, such as ``corpus/*.parquet``; or of a remote directory.
        columns: columns that are read; None: all.
    """

    columns: tuple[str, ...] | None = None

    def _num_records(self, file: int) -> int:
        return int(self._group_ends[file][-1]) if len(self._group_ends[file]) else 0

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        ends = self._group_ends[file]
        group = int(np.searchsorted(ends, number, side="right"))
        table = self._groups[file, group]
        row = number - (int(ends[group - 1]) if group else 0)
        return {name: table[name][row].as_py() for name in table.column_names}

    @functools.cached_property
    def _group_ends(self) -> list[np.ndarray]:
        """Ends of the row groups of each file, in rows."""
        _arrow("ParquetFiles.pattern", self.pattern)
        ends = []
        for one in self.files:
            head = self._opened(one).metadata
            ends.append(np.cumsum([head.row_group(place).num_rows for place in range(head.num_row_groups)]))
        return ends

    @functools.cached_property
    def _groups(self) -> Parts:
        return Parts(lambda part: self._read(*part))

    def _read(self, file: int, group: int) -> Any:
        one = self.files[file]
        one.check()
        columns = None if self.columns is None else list(self.columns)
        try:
            return self._opened(one).read_row_group(group, columns=columns)
        except (OSError, ValueError) as error:
            raise DataError(f"{one.path}: row group {group} cannot be read: {first_line(error)}") from error

    def _opened(self, one: RecordFile) -> Any:
        arrow = _arrow("ParquetFiles.pattern", self.pattern)
        import pyarrow.parquet

        try:
            source = arrow.BufferReader(one.content()) if one.is_remote else one.path
            return pyarrow.parquet.ParquetFile(source)
        except (OSError, ValueError) as error:
            raise DataError(f"{one.path} is not a Parquet file: {first_line(error)}") from error


@dataclass(frozen=True)
class DatasetDirectory(FileRecords):
    """A directory that ``Dataset.save_to_disk`` of Hugging Face's ``datasets`` wrote. Needs the extra ``parquet``.

    A record is a row, and its fields are the columns; values other than texts, numbers or lists are as Arrow has them.

    Args:
        pattern: the directory.
    """

    @functools.cached_property
    def files(self) -> tuple[RecordFile, ...]:
        """The Arrow files of the directory, by name."""
        if not (Path(self.pattern) / "dataset_info.json").is_file():
            why = "is not a directory written by Dataset.save_to_disk: it has no dataset_info.json"
            raise SettingError("DatasetDirectory.pattern", self.pattern, why)
        return find_files("DatasetDirectory.pattern", str(Path(self.pattern) / "*.arrow"))

    def _num_records(self, file: int) -> int:
        return int(self._tables[file].num_rows)

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        self.files[file].check()
        table = self._tables[file]
        return {name: table[name][number].as_py() for name in table.column_names}

    @functools.cached_property
    def _tables(self) -> list[Any]:
        """The tables, mapped into memory and read as rows are asked for."""
        arrow = _arrow("DatasetDirectory.pattern", self.pattern)
        found = []
        for one in self.files:
            try:
                found.append(arrow.ipc.open_stream(arrow.memory_map(one.path)).read_all())
            except (OSError, ValueError) as error:
                raise DataError(f"{one.path} is not an Arrow file: {first_line(error)}") from error
        return found
