"""Records of ArrayRecord files."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grain

from swift.data.files import DataError
from swift.data.records.files import FileRecords
from swift.errors import first_line


@dataclass(frozen=True)
class ArrayRecords(FileRecords):
    """ArrayRecord files, which Grain reads; each record is the field ``record``, bytes.

    Args:
        pattern: pattern of the files, such as ``corpus/*.array_record``.
    """

    def _num_records(self, file: int) -> int:
        return len(self._sources[file])

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        one = self.files[file]
        one.check()
        try:
            return {"record": self._sources[file][number]}
        except Exception as error:  # the library raises many kinds
            raise DataError(f"{one.path}: record {number + 1} cannot be read: {first_line(error)}") from error

    @functools.cached_property
    def _sources(self) -> list[Any]:
        return [self._opened(one.path) for one in self.files]

    def _opened(self, path: str) -> Any:
        try:
            source = grain.sources.ArrayRecordDataSource([path])
            len(source)
        except Exception as error:  # the library raises many kinds
            raise DataError(f"{path} is not an ArrayRecord file: {first_line(error)}") from error
        return source
