"""The gin files of a configuration: found in the working directory or the package, and read with what they include."""

import importlib
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import swift
from swift.errors import SettingError, error_line, first_line


def gin_texts(path: Path, including: tuple[Path, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yields the text of a file, and of those that it includes, in the order in which gin is to parse them.

    ``include`` names a file beside it, while gin would look in the working directory. Modules that a file imports are
    imported here.

    Args:
        path: gin file.
        including: files that include it, the first one first.

    Yields:
        (text, with line feeds in front so that errors name the right line; its file).

    Raises:
        SettingError: a file cannot be read, includes itself, or names a module that cannot be imported.
    """
    path = installed(path)
    lines, first = _read(path, including).splitlines(), 0

    def text(end: int) -> str:
        return "\n" * first + "\n".join(lines[first:end])

    for number, line in enumerate(lines):
        imported = re.fullmatch(r"\s*import\s+([\w.]+)\s*(#.*)?", line)
        if imported:
            _import(imported[1], number + 1, path)
        include = re.fullmatch(r"\s*include\s+['\"](.*)['\"]\s*(#.*)?", line)
        if include:
            yield text(number), path
            yield from gin_texts(_beside(path, include[1]), (*including, path))
            first = number + 1
    yield text(len(lines)), path


def installed(path: Path) -> Path:
    """Returns the path of an experiment: where the working directory has no ``experiments/...``, the package has it."""
    package = Path(swift.__file__).parent
    if path.exists() or path.parts[:1] != ("experiments",):
        return path
    return next((root / path for root in (package, package.parent) if (root / path).exists()), path)


def all_installed(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths of experiments; a pattern that the shell found nothing for is one of the package's."""
    found = []
    for path in paths:
        folder = installed(path.parent)
        matching = sorted(folder.glob(path.name)) if "*" in path.name and folder != path.parent else []
        found += matching or [path]
    return found


def _beside(path: Path, name: str) -> Path:
    """Returns the file that a file includes: beside it, or of the package."""
    included, shipped = path.parent / name, installed(Path(name))
    return shipped if shipped != Path(name) and not included.exists() else included


def _import(name: str, line: int, path: Path) -> None:
    """Imports a module that a file names, before gin does: gin would take its errors for those of the file."""
    try:
        importlib.import_module(name)
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        why = f"{where} raises {error_line(error)}" if own else first_line(error)
        raise SettingError("CONFIG", str(path), f"line {line} cannot be followed: {why}") from error


def _read(path: Path, including: tuple[Path, ...]) -> str:
    names = " includes ".join(map(str, (*including, path)))
    if os.path.realpath(path) in map(os.path.realpath, including):
        raise SettingError("CONFIG", names, "a file cannot include itself")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError("CONFIG", names, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError("CONFIG", names, f"is not UTF-8 text (byte {error.start})") from error
