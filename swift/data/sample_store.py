"""Caches of samples in memory or files, and surveys that later runs can reuse.

The cache directory has one subdirectory for each survey, named by a digest of everything that determines its result:
the source, and the operators' settings, their code and the values that the code refers to. Its files:

- ``samples``: encoded samples, one after the other
- ``index``: int64[2, num + 1], the offset at which each sample begins, and its CRC-32 (0 in the last column)
- ``numbers``: int64, numbers of the records that are kept; missing if all are kept
- ``lengths``: int64, number of tokens of each record that is kept; missing if nothing is packed
- ``survey.json``: version, counts, checksums and skipped records; written last
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
import threading
import types
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np

from swift.data.encoding import checked_copy, copied, decoded, encoded
from swift.data.operators import Chat, name_of
from swift.data.pipeline import InputPlan, Pipeline
from swift.data.remote_records import InputHosts
from swift.data.sources import DataError
from swift.data.survey import Survey, survey
from swift.data.tokenizer import TokenizerFile
from swift.errors import SettingError
from swift.files import new_directory, open_regular, replace_file, this_program

_DIGEST_VERSION = 2
_SURVEY_VERSION = 1
_HEAD = "survey.json"
_PROBE_BYTES = 1 << 16
"""Size in bytes of the file that tests for free space; a full disk would still accept an empty file."""


class NoDigest(ValueError):
    """A value has no digest, because it cannot be distinguished from other values; the message names the value."""


def survey_digest(plan: InputPlan) -> str:
    """Returns a digest of everything that determines a plan's survey and cached samples.

    Raises:
        NoDigest: the source or an operator has no digest.
    """
    source = plan.pipeline.source.digest()
    if source is None:
        raise NoDigest(f"the source {plan.pipeline.source!r} has no identity that tells it from another")
    parts = [
        _DIGEST_VERSION,
        sys.version,
        np.__version__,
        source,
        plan.num_packed > 0,
        plan.pipeline.most_skipped,
        plan.cache.num_elements if plan.cache is not None else None,
        *(value_digest(element) for element in plan.elements(0)[: plan.num_surveyed]),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def pipeline_facts(pipeline: Pipeline) -> dict[str, str]:
    """Returns the facts, by name, on which two machines must agree to produce the same samples.

    Raises:
        NoDigest: the source or an operator has no digest.
    """
    source = pipeline.source.digest()
    if source is None:
        raise NoDigest(f"the source {pipeline.source!r} has no identity that tells it from another")
    elements = [(name_of(element), value_digest(element)) for element in pipeline.levels[0].elements]
    return {
        "version of Swift, Python, JAX or NumPy": f"{this_program()} {sys.version}",
        "data": source,
        "operators": hashlib.sha256(repr(elements).encode()).hexdigest(),
    }


def value_digest(value: Any) -> str:
    """Digests a setting, or a function with the functions and constants of its module that it refers to.

    Code of other modules is identified only by name: after changing it, use a different or an empty cache directory.

    Raises:
        NoDigest: the value is, or refers to, an object without a digest.
    """
    return hashlib.sha256(repr(_describe(value, {})).encode()).hexdigest()


def _describe(value: Any, seen: dict[int, int]) -> Any:
    """Describes a value by nested tuples of plain values; ``seen`` numbers visited objects, to terminate on cycles."""
    if value is None or isinstance(value, str | bytes | int | float | complex | type(...)):
        return type(value).__name__, value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    description = _container(value, seen)
    if description is None:
        description = _code(value, seen)
    if description is None:
        raise NoDigest(f"{value!r} ({type(value).__name__}) has no identity that tells it from another")
    return description


def _container(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, TokenizerFile):
        return "tokenizer", value.digest(), value.end_of_document
    if isinstance(value, Chat):
        return "chat", _describe((value.tokenizer, value.template, value.field, value.end_of_document), seen)
    if isinstance(value, tuple | list):
        return type(value).__name__, [_describe(element, seen) for element in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(_describe(element, seen)) for element in value)
    if isinstance(value, dict):
        return "dict", [(_describe(key, seen), _describe(entry, seen)) for key, entry in value.items()]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _describe(getattr(value, f.name), seen) for f in dataclasses.fields(value)}
        return "dataclass", _describe(type(value), seen), fields
    return None


def _code(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, functools.partial):
        parts = value.func, value.args, dict(value.keywords)
        return "partial", *(_describe(part, seen) for part in parts)
    if isinstance(value, types.MethodType):
        return "method", _describe(value.__func__, seen), _describe(value.__self__, seen)
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, types.ModuleType):
        return "module", value.__name__, getattr(value, "__version__", None)
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return "builtin", getattr(value, "__module__", None), value.__name__
    if isinstance(value, type):
        try:
            return "class", value.__module__, value.__qualname__, inspect.getsource(value)
        except (OSError, TypeError):  # written in C, or typed into an interpreter: no source
            return ("class", value.__module__, value.__qualname__) if value.__module__ != "__main__" else None
    if hasattr(value, "pattern") and hasattr(value, "flags"):  # a compiled regular expression
        return "pattern", value.pattern, int(value.flags)
    return None


def _function(function: types.FunctionType, seen: dict[int, int]) -> Any:
    closure = [_describe(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    defaults = _describe((function.__defaults__ or (), dict(function.__kwdefaults__ or {})), seen)
    is_own = function.__module__.partition(".")[0] not in sys.stdlib_module_names
    referred = _referred(function, seen) if is_own else []
    name, code = f"{function.__module__}.{function.__qualname__}", _bytecode(function.__code__)
    return "function", name, code, closure, defaults, referred


def _referred(function: types.FunctionType, seen: dict[int, int]) -> Sequence[Any]:
    """Describes the globals that a function refers to; functions of other modules by name only."""
    entries = list[Any]()
    for name in sorted(_names(function.__code__) & set(function.__globals__)):
        value = function.__globals__[name]
        if getattr(value, "__module__", function.__module__) not in (function.__module__, None):
            entries.append((name, getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(type(value)))))
        else:
            entries.append((name, _describe(value, seen)))
    return entries


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _bytecode(code: types.CodeType) -> Any:
    constants = list(map(_constant, code.co_consts))
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants


def _constant(value: Any) -> Any:
    """Describes a constant of a code object. Frozensets are sorted, since their order differs between processes."""
    if isinstance(value, types.CodeType):
        return _bytecode(value)
    if isinstance(value, tuple):
        return "tuple", list(map(_constant, value))
    return ("frozenset", sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


class _InMemory:
    """A cache of samples in memory."""

    form = staticmethod(checked_copy)

    def __init__(self) -> None:
        self._samples: list[dict[str, Any]] = []

    def add(self, number: int, sample: dict[str, Any]) -> None:
        del number
        self._samples.append(sample)

    def closed(self) -> "_InMemory":
        return self

    def __getitem__(self, place: int) -> dict[str, Any]:
        return copied(self._samples[place])


class _Files:
    """A cache of samples in files, while it is being written."""

    form = staticmethod(encoded)

    def __init__(self, directory: Path, file: BinaryIO):
        self._directory, self._file = directory, file
        self._begins, self._sums = [0], list[int]()

    def add(self, number: int, sample: bytes) -> None:
        del number
        self._file.write(sample)
        self._begins.append(self._begins[-1] + len(sample))
        self._sums.append(zlib.crc32(sample))

    def closed(self) -> "_SampleCache":
        self._file.flush()
        os.fsync(self._file.fileno())
        np.array([self._begins, [*self._sums, 0]], np.int64).tofile(self._directory / "index")
        return _SampleCache(self._directory)


class _SampleCache:
    """A cache of samples in files; each sample's CRC-32 is checked when it is read. Pickled as its directory.

    Args:
        directory: directory of the files.

    Raises:
        OSError: a file is missing or damaged, or the samples do not have the size that the index states.
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
    """Loads the stored survey of a plan; if there is none, surveys the source and stores the result.

    Args:
        plan: plan of a pipeline.
        directory: directory of stored surveys; None to store nothing, and cache samples in memory.
        report: called with a line if the survey cannot be stored.
        progress: see ``survey``.
        hosts: see ``survey``.

    Raises:
        SettingError: the directory cannot be written to, or the disk is full. Unfinished files are removed.
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
    stored_survey = _read_survey(path, plan)
    if stored_survey is None:
        _write_survey(plan, path, progress, hosts)
        stored_survey = _read_survey(path, plan)
    if stored_survey is None:
        raise DataError(f"{path} cannot be read again after it was written")
    return stored_survey


def _read_survey(path: Path, plan: InputPlan) -> Survey | None:
    """Reads a stored survey; returns None if it is missing or damaged."""
    try:
        head = json.loads((path / _HEAD).read_text())
        if head["version"] != _SURVEY_VERSION:
            return None
        num_kept, files = int(head["num_kept"]), dict[str, np.ndarray | None]()
        for name in ("numbers", "lengths"):
            files[name] = np.fromfile(path / name, np.int64) if head[name] is not None else None
            array = files[name]
            if array is not None and (len(array) != num_kept or zlib.crc32(array.tobytes()) != head[name]):
                return None
        cache = _SampleCache(path) if plan.cache is not None else None
        if cache is not None and len(cache) != num_kept:
            return None
        return Survey(num_kept, files["numbers"], files["lengths"], cache, tuple(map(str, head["skipped"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_writable(directory: Path) -> None:
    """Checks that files can be written to a directory, by writing a temporary file.

    If the directory does not exist, its nearest existing parent is checked.

    Raises:
        SettingError: the path is not a directory, writing is forbidden, or the disk is full.
    """
    try:
        nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        probe = nearest / f".{uuid4().hex}.writable"
        replace_file(probe, bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> SettingError:
    reason = f"samples cannot be kept there: {error.strerror or error}"
    return SettingError("Resources.cache_directory", str(directory), reason)


def _write_survey(
    plan: InputPlan, path: Path, progress: Callable[[int, int], None] | None, hosts: InputHosts | None
) -> None:
    check_writable(path.parent)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove(path)  # it must be damaged: an intact survey would have been read
        with new_directory(path) as temporary, (temporary / "samples").open("wb") as file:
            files = None if plan.cache is None else _Files(temporary, file)
            new_survey = survey(plan, files, progress, hosts)
            head: dict[str, Any] = {
                "version": _SURVEY_VERSION,
                "num_kept": new_survey.num_kept,
                "skipped": new_survey.skipped,
            }
            for name, array in (("numbers", new_survey.numbers), ("lengths", new_survey.lengths)):
                head[name] = None if array is None else zlib.crc32(array.tobytes())
                if array is not None:
                    array.tofile(temporary / name)
            replace_file(temporary / _HEAD, json.dumps(head).encode())
    except OSError as error:  # not an error if another process stored the same survey in the meantime
        if _read_survey(path, plan) is None:
            raise _unwritable(path.parent, error) from error


def _remove(path: Path) -> None:
    if path.exists():
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
