"""Files that a command writes: it replaces its own of an earlier time, and nobody else's."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swift.errors import SettingError

_HEAD_BYTES = 1 << 14


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a command writes.

    Attributes:
        words: its name, with an article.
        head: pattern of the beginning of such a file.
        may_be_special: whether it may also go to a pipe or a device, which is written to and not replaced.
    """

    words: str
    head: re.Pattern[bytes]
    may_be_special: bool = False


PAGE = OutputKind("a page of Swift", re.compile(rb"\s*<!doctype html>.*?<title>Swift: ", re.IGNORECASE | re.DOTALL))
# A PNG that earlier versions drew does not say so: it has 160 dots an inch, and no text before them.
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
    """Checks that a file may be written, before anything is computed.

    Args:
        option: option that gives its name.
        path: its path; a link to a file counts as that file.
        kind: kind of the file.
        inputs: files that the command reads.

    Raises:
        SettingError: there is no directory for it, or something else is there: a directory, an input of the command by
            whatever name, or a file of another kind.
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
        raise SettingError(option, str(path), "is not a file, but a pipe or a device; choose another name")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise SettingError(option, str(path), f"cannot be replaced: {error.strerror}") from error
    if not kind.head.match(head):
        raise SettingError(option, str(path), f"is a file that is not {kind.words}; choose another name")
