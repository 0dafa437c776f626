"""Documents of a source of texts as records."""

import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from swift.data.records.files import RecordFile, state_of
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

    @functools.cached_property
    def _files(self) -> Mapping[str, RecordFile]:
        """The files as they were found, by path; one that cannot be found is reported when it is read."""
        found = dict[str, RecordFile]()
        for document in self._listed:
            if document.path is not None:
                with suppress(OSError):
                    found[document.path] = RecordFile(document.path, state_of(document.path))
        return found

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Reads a document.

        Raises:
            ChangedFile: its file has changed since it was found.
        """
        document = self._listed[number]
        file = None if document.path is None else self._files.get(document.path)
        text = document.read()
        if file is not None:
            file.check()
        return {"name": document.name, "text": text}

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
            file = None if document.path is None else self._files.get(document.path)
            if file is None:
                return None
            path = os.path.abspath(file.path)
            said.append(f"{document.name!r} {path!r} {file.state.num_bytes} {file.state.mtime_ns}")
        return sha256("\n".join(said).encode(errors="surrogatepass")).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the source, and the files as they were found: another process lists them itself."""
        found = {"_files": self._files} if "_files" in self.__dict__ else {}
        return {one.name: getattr(self, one.name) for one in fields(self)} | found
