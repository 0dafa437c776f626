"""Records: samples of a source by number, each a mapping of fields, with the place where it comes from."""

from swift.data.records.protocol import RecordSource, Rows

__all__ = ["RecordSource", "Rows"]
