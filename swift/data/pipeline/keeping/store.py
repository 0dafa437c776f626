"""Samples that are kept, in memory or in files, and surveys found again by another run.

NAME/samples        encoded samples, one after the other
NAME/index          int64 [2, num + 1]: where each begins, and a CRC-32 of it (0 in the last place)
NAME/numbers        int64: numbers of the records that stay; missing: all of them
NAME/lengths        int64: tokens of each; missing: nothing is packed
NAME/survey.json    what the files are: written last
"""

import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np

from swift.data.files import DataError
from swift.data.pipeline.elsewhere import InputHosts
from swift.data.pipeline.encoding import copied, decoded, encoded, held
from swift.data.pipeline.keeping.digests import NoDigest, survey_digest
from swift.data.pipeline.plan import InputPlan
from swift.data.pipeline.survey import Survey, survey
from swift.errors import SettingError
from swift.files import new_directory, open_regular, replace_file

_VERSION = 1
_HEAD = "survey.json"
_PROBE_BYTES = 1 << 16
"""Bytes that a directory must have room for: a full one takes empty files."""


class _InMemory:
    """Samples in memory."""

    form = staticmethod(held)

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []

    def add(self, number: int, kept: dict[str, Any]) -> None:
        del number
        self._kept.append(kept)

    def closed(self) -> "_InMemory":
        return self

    def __getitem__(self, place: int) -> dict[str, Any]:
        return copied(self._kept[place])


class _Files:
    """Samples written to files."""

    form = staticmethod(encoded)

    def __init__(self, directory: Path, file: BinaryIO):
        self._directory, self._file = directory, file
        self._begins, self._sums = [0], list[int]()

    def add(self, number: int, kept: bytes) -> None:
        del number
        self._file.write(kept)
        self._begins.append(self._begins[-1] + len(kept))
        self._sums.append(zlib.crc32(kept))

    def closed(self) -> "KeptFiles":
        self._file.flush()
        os.fsync(self._file.fileno())
        np.array([self._begins, [*self._sums, 0]], np.int64).tofile(self._directory / "index")
        return KeptFiles(self._directory)


class KeptFiles:
    """Samples in files, each checked when it is read; another process gets the directory.

    Args:
        directory: directory of the files.

    Raises:
        OSError: a file is missing, or does not have the size that the index says.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._open()

    def _open(self) -> None:
        index = np.fromfile(self._directory / "index", np.int64)
        if index.size < 2 or index.size % 2 or index[0] or (np.diff(index[: index.size // 2]) < 0).any():
            raise OSError("the index is damaged")
        self._begins, self._sums = index.reshape(2, -1)
        self._fd = open_regular(self._directory / "samples")
        self._lock = threading.Lock()
        if os.fstat(self._fd).st_size != self._begins[-1]:
            raise OSError("the samples are not as long as the index says")

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, place: int) -> dict[str, Any]:
        begin, end = int(self._begins[place]), int(self._begins[place + 1])
        content = os.pread(self._fd, end - begin, begin)
        if zlib.crc32(content) != self._sums[place]:
            raise DataError(f"{self._directory}/samples is damaged (sample {place}): remove the directory")
        return decoded(content)

    def __getstate__(self) -> Path:
        return self._directory

    def __setstate__(self, directory: Path) -> None:
        self._directory = directory
        self._open()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def find_survey(
    plan: InputPlan,
    directory: Path | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
    hosts: InputHosts | None = None,
) -> Survey:
    """Finds what an earlier survey has found; surveys the source if there is none.

    Args:
        plan: plan of a pipeline.
        directory: directory of surveys; None: nothing outlives the process, and what is kept is kept in memory.
        report: called with a line on what cannot be kept.
        progress: see ``survey``.
        hosts: see ``survey``.

    Raises:
        SettingError: the directory cannot be written, or is full. Nothing half-written stays.
        DataError: see ``survey``.
    """
    is_trivial = not plan.num_surveyed and plan.cache is None and not plan.num_packed
    if plan.cache is not None and plan.cache.kind == "memory":
        return survey(plan, _InMemory(), progress, hosts)
    if directory is None or is_trivial:
        return survey(plan, None if plan.cache is None else _InMemory(), progress, hosts)
    try:
        name = survey_digest(plan)
    except NoDigest as error:
        report(f"nothing is kept in {directory}: {error}")
        return survey(plan, None if plan.cache is None else _InMemory(), progress, hosts)
    path = directory / name
    found = read_survey(path, plan)
    if found is None:
        _write_survey(plan, path, progress, hosts)
        found = read_survey(path, plan)
    if found is None:
        raise DataError(f"{path} cannot be read again after it was written")
    return found


def read_survey(path: Path, plan: InputPlan) -> Survey | None:
    """Reads a survey; None if there is none, or it is damaged."""
    try:
        head = json.loads((path / _HEAD).read_text())
        if head["version"] != _VERSION:
            return None
        num_kept, files = int(head["num_kept"]), dict[str, np.ndarray | None]()
        for name in ("numbers", "lengths"):
            files[name] = np.fromfile(path / name, np.int64) if head[name] is not None else None
            array = files[name]
            if array is not None and (len(array) != num_kept or zlib.crc32(array.tobytes()) != head[name]):
                return None
        cache = KeptFiles(path) if plan.cache is not None else None
        if cache is not None and len(cache) != num_kept:
            return None
        return Survey(num_kept, files["numbers"], files["lengths"], cache, tuple(map(str, head["skipped"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_writable(directory: Path) -> None:
    """Refuses a directory of surveys in which no file can be written; leaves nothing behind.

    Where it does not exist, the nearest directory above it is examined.

    Raises:
        SettingError: it is no directory, forbidden or full.
    """
    try:
        nearest = next(one for one in (directory, *directory.absolute().parents) if one.exists())
        probe = nearest / f".{uuid4().hex}.writable"
        replace_file(probe, bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> SettingError:
    why = f"samples cannot be kept there: {error.strerror or error}"
    return SettingError("Resources.cache_directory", str(directory), why)


def _write_survey(
    plan: InputPlan, path: Path, progress: Callable[[int, int], None] | None, hosts: InputHosts | None
) -> None:
    check_writable(path.parent)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove(path)  # damaged, or it would have been found
        with new_directory(path) as made, (made / "samples").open("wb") as file:
            files = None if plan.cache is None else _Files(made, file)
            found = survey(plan, files, progress, hosts)
            head: dict[str, Any] = {"version": _VERSION, "num_kept": found.num_kept, "skipped": found.skipped}
            for name, array in (("numbers", found.numbers), ("lengths", found.lengths)):
                head[name] = None if array is None else zlib.crc32(array.tobytes())
                if array is not None:
                    array.tofile(made / name)
            replace_file(made / _HEAD, json.dumps(head).encode())
    except OSError as error:  # unless another process has written the same meanwhile
        if read_survey(path, plan) is None:
            raise _unwritable(path.parent, error) from error


def _remove(path: Path) -> None:
    if path.exists():
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
