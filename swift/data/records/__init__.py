"""Records: samples of a source by number, each a mapping of fields, with the place where it comes from.

JSON lines, ArrayRecord and Parquet files, directories of Hugging Face's ``datasets``, documents of ``TextFiles``, and
records in memory. A user's own source has the four methods of ``RecordSource``.
"""

from swift.data.records.array_records import ArrayRecords
from swift.data.records.documents import Documents
from swift.data.records.lines import JsonLines
from swift.data.records.protocol import ChosenRecords, RecordSource, Rows
from swift.data.records.tables import DatasetDirectory, ParquetFiles

__all__ = [
    "ArrayRecords",
    "ChosenRecords",
    "DatasetDirectory",
    "Documents",
    "JsonLines",
    "ParquetFiles",
    "RecordSource",
    "Rows",
]
