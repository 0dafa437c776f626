"""Parses values on the command line (named numbers, durations, workers, deadlines) and checks output files.

Examples are ``--costs tF=1 tB=1.3``, ``--mtbf 6h``, ``--fail 1:2`` and ``--deadline stopping=300``. A command may
replace only files of the kind that it writes, see ``check_output``.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift.deadlines import Deadlines
from swift.errors import SettingError, suggest
from swift.schedules.problem import COST_NAMES, Costs
from swift.topology import Worker, read_worker

_MAX_COST = 1e18
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

OF_PROCESSES = ("start", "forming", "heartbeat", "progress", "saving", "dying", "stopping")
"""Names of the deadlines of ``launch``."""
OF_ONE = ("stopping",)
"""Names of the deadlines of a run in one process."""

_HEAD_BYTES = 1 << 14


def named_numbers(option: str, texts: Sequence[str], fields: Mapping[str, str], example: str) -> dict[str, float]:
    """Parses texts of the form NAME=NUMBER, and returns the number for each field.

    Args:
        option: option that the texts were given for.
        texts: texts such as ``tB=1.3``.
        fields: maps the names that users write to fields.
        example: a valid text, for error messages.

    Raises:
        SettingError: a text is not NAME=NUMBER, a name is unknown or repeated, or a number exceeds 1e18.
    """
    values: dict[str, float] = {}
    seen = set()
    for text in texts:
        name, is_set, number = text.partition("=")
        if not is_set:
            raise SettingError(option, text, f"must be NAME=VALUE, such as {example}")
        if name not in fields:
            raise SettingError(option, text, f"there is no {name}; {suggest(name, fields)}")
        try:
            values[fields[name]] = float(number)
        except ValueError as error:
            raise SettingError(option, text, f"{number!r} is not a number") from error
        if name in seen:
            raise SettingError(option, text, f"{name} is given twice")
        seen.add(name)
        if values[fields[name]] > _MAX_COST:
            raise SettingError(option, text, f"must be at most {_MAX_COST:g}: take a larger unit")
    return values


def costs_of(texts: Sequence[str]) -> Costs:
    """Parses ``--costs``; the W-stash defaults to the F-stash.

    Raises:
        SettingError: a text is not NAME=NUMBER, or a name or a cost is invalid.
    """
    values = named_numbers("--costs", texts, COST_NAMES, "tB=1.3")
    if "f_stash" in values:
        values.setdefault("w_stash", values["f_stash"])
    return Costs(**values)


def workers_of(option: str, texts: Sequence[str]) -> frozenset[Worker]:
    """Parses workers, each in the form PIPELINE:STAGE.

    Raises:
        SettingError: a text does not have this form, or a worker is repeated.
    """
    workers = set()
    for text in texts:
        worker = read_worker(text)
        if worker is None:
            raise SettingError(option, text, "must be PIPELINE:STAGE, such as 1:2")
        if worker in workers:
            raise SettingError(option, text, "is given twice")
        workers.add(worker)
    return frozenset(workers)


def seconds_of(option: str, text: str) -> float:
    """Converts a duration such as ``10m`` to seconds; a number without a unit means seconds, with a note on stderr.

    Raises:
        SettingError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if not match:
        raise SettingError(option, text, "must be a duration, such as 90s, 10m, 6h or 2d")
    if not match[2]:
        print(f"swift: {option} {text} has no unit and is taken for {text}s", file=sys.stderr)
    return float(match[1]) * _UNITS_S[match[2]]


def deadlines_of(texts: Sequence[str], names: Sequence[str], defaults: Deadlines | None = None) -> Deadlines:
    """Parses ``--deadline``; other deadlines come from ``defaults``, or from ``Deadlines()`` if that is None.

    >>> deadlines_of(["heartbeat=2"], OF_PROCESSES).heartbeat
    2.0
    """
    limits = {}
    for text in texts:
        name, _, seconds = text.partition("=")
        try:
            limits[name] = float(seconds)
        except ValueError:
            name = ""
        if name not in names:
            raise SettingError("--deadline", text, f"must be NAME=SECONDS, where NAME is one of {', '.join(names)}")
    return replace(defaults or Deadlines(), **limits)  # type: ignore[arg-type]


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a command writes, and how to recognize it.

    Attributes:
        words: name of the kind, with an article if it needs one.
        head: pattern that matches the beginning of such a file.
        may_be_special: whether the output may also go to a pipe or a device, which is written to rather than replaced.
    """

    words: str
    head: re.Pattern[bytes]
    may_be_special: bool = False


PAGE = OutputKind("a page of Swift", re.compile(rb"\s*<!doctype html>.*?<title>Swift: ", re.IGNORECASE | re.DOTALL))
# PNG files from earlier versions of Swift do not name Matplotlib. They are recognized by their resolution of 160 dots
# per inch, which directly follows the header.
_EARLIER_PNG = rb"\x89PNG\r\n\x1a\n.{4}IHDR.{8}\x08\x06\0\0\0.{4}\0\0\0\x09pHYs(\0\0\x18\x9b){2}\x01"
_PICTURE = rb"(\x89PNG|\s*<\?xml|\s*<svg).*?Matplotlib|" + _EARLIER_PNG
PICTURE = OutputKind("a picture that Matplotlib drew", re.compile(_PICTURE, re.DOTALL))
PLACEMENT = OutputKind(
    "a placement", re.compile(rb"\x93NUMPY.{2,6}\{'descr': '[<>|=]i4'.*?'shape': \(\d+, \d+, \d+\)", re.DOTALL)
)
_PLAN = rb'|\s*\{"(topology|displayTimeUnit)"|([^\n]*\n){0,9}?\d+ pipelines? x \d+ stage'
PLAN = OutputKind("a plan", re.compile(_PICTURE + _PLAN, re.DOTALL), may_be_special=True)
RESULTS = OutputKind("results of an evaluation", re.compile(rb'\s*\{\s*"format": \d+,\s*"models"'))


def check_output(option: str, path: Path, kind: OutputKind, inputs: Iterable[Path] = ()) -> None:
    """Checks that a file may be created or replaced; commands call this before they compute anything.

    Args:
        option: option that gives the path.
        path: path of the file; a link to a file counts as that file.
        kind: kind of file that the command writes; an existing file must be of this kind.
        inputs: files that the command reads, which must not be overwritten.

    Raises:
        SettingError: the parent directory does not exist, or the path is a directory, a dangling link, an input of the
            command under any name, or an existing file of another kind.
    """
    if path.is_dir():
        raise SettingError(option, str(path), "is a directory, not a file")
    if not path.parent.is_dir():
        raise SettingError(option, str(path), f"cannot be written: there is no directory {path.parent}")
    if not path.exists():
        if path.is_symlink():
            raise SettingError(option, str(path), f"is a link to {os.readlink(path)}, which does not exist")
        return
    for read in inputs:
        if read.exists() and path.samefile(read):
            raise SettingError(option, str(path), f"is read by this command, as {read}; choose another name")
    if not path.is_file():
        if kind.may_be_special:
            return
        raise SettingError(option, str(path), "is a pipe or a device, not a regular file; choose another name")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise SettingError(option, str(path), f"cannot be replaced: {error.strerror}") from error
    if not kind.head.match(head):
        raise SettingError(option, str(path), f"exists and is not {kind.words}; choose another name")
