"""The protocol of a source of records, and records in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from swift.errors import SettingError


@runtime_checkable
class RecordSource(Protocol):
    """Records by number, the same on every machine; threads may share one, and another process gets it as a pickle."""

    def __len__(self) -> int:
        """Returns the number of records."""
        ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Reads a record."""
        ...

    def name(self, number: int) -> str:
        """Returns the name of a record, the same on every machine: its hash decides between training and validation."""
        ...

    def place(self, number: int) -> str:
        """Returns where a record comes from, for messages: a file and a position in it."""
        ...

    def digest(self) -> str | None:
        """Returns a digest that differs if a record does; None if there is none, and nothing made of them is kept."""
        ...


class Rows:
    """Records in memory.

    Args:
        records: mappings of fields.

    Raises:
        SettingError: there is no record.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]):
        if not len(records):
            raise SettingError("Rows.records", [], "must be at least one record")
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._records[number]

    def name(self, number: int) -> str:
        """Returns the number of a record."""
        return self.place(number)

    def place(self, number: int) -> str:
        """Returns the number of a record."""
        return f"record {number}"

    def digest(self) -> str | None:
        """Returns a digest of all records; None if one has a field other than text, bytes, a number or an array."""
        made = hashlib.sha256()
        for record in self._records:
            for name, value in record.items():
                if isinstance(value, np.ndarray) and value.dtype != object:
                    said = f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
                elif isinstance(value, str | bytes | int | float | None):
                    said = repr(value).encode()
                else:
                    return None
                made.update(f"{name!r} {len(said)} ".encode() + said)
            made.update(b"end of record")
        return made.hexdigest()

    def __repr__(self) -> str:
        return f"Rows({len(self._records)} records)"


@dataclass(frozen=True)
class ChosenRecords:
    """Some records of a source, in its order.

    Args:
        source: source.
        numbers: numbers of the records, ascending.
    """

    source: RecordSource
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self.source[self.numbers[number]]

    def name(self, number: int) -> str:
        """Returns the name of a record."""
        return self.source.name(self.numbers[number])

    def place(self, number: int) -> str:
        """Returns where a record comes from."""
        return self.source.place(self.numbers[number])

    def digest(self) -> None:
        """Returns None: nothing made of them is kept."""
