"""Documents of a source of texts as records."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from swift.data.sources import Document, TextSource


@dataclass(frozen=True)
class Documents:
    """Documents of a source of texts, such as ``TextFiles``, with the fields ``name`` and ``text``.

    Args:
        source: source of the texts.
    """

    source: TextSource

    @functools.cached_property
    def _listed(self) -> Sequence[Document]:
        return self.source.documents()

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        document = self._listed[number]
        return {"name": document.name, "text": document.read()}

    def name(self, number: int) -> str:
        """Returns the name of a document."""
        return self._listed[number].name

    def place(self, number: int) -> str:
        """Returns the path of a document; its name where it has none."""
        return self._listed[number].path or self._listed[number].name

    def digest(self) -> str | None:
        """Returns a digest of names, sizes and times of the files; None if a document is in no file."""
        said = list[str]()
        for document in self._listed:
            if document.path is None:
                return None
            try:
                found = os.stat(document.path)
            except OSError:  # reading it says best what is wrong with it
                return None
            said.append(f"{document.name!r} {os.path.abspath(document.path)!r} {found.st_size} {found.st_mtime_ns}")
        return sha256("\n".join(said).encode(errors="surrogatepass")).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}
