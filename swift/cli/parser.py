"""An argument parser with one-line error messages that suggest the nearest known word."""

import argparse
import difflib
import errno
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

from swift import __version__
from swift.errors import SettingError, printable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CHOICE = re.compile(r"(.*invalid choice: ('[^']*'|\S+)) \(choose from (.*)\)", re.DOTALL)


class OneLineParser(argparse.ArgumentParser):
    """Argument parser for the whole command line or for one command, with suggestions in its error messages.

    Attributes:
        hidden: commands that are accepted but never suggested.
        instead: maps words that are not commands to the command line that the user probably means.
        commands: parsers of the commands by name.
    """

    hidden: Collection[str] = ()
    instead: Mapping[str, str] = {}
    commands: Mapping[str, argparse.ArgumentParser] = {}
    _first = ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; for an unknown one, exits with an error that suggests the nearest option."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, [self, *filter(None, [self.commands.get(options.command)])])
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses known arguments, and stores the first one for ``error``.

        If the first argument is an unknown option and a required argument is missing, the unknown option is the mistake
        to report; argparse would report the missing argument.
        """
        first = next(iter(sys.argv[1:] if args is None else args), "")
        self._first = first if first.startswith("--") else ""
        return super().parse_known_args(args, namespace)

    def _refuse(self, unknown: Sequence[str], parsers: Sequence[argparse.ArgumentParser]) -> NoReturn:
        names = _options(parsers)
        near = _did_you_mean(unknown[0].partition("=")[0], names)
        if not near and "--set" in names:
            near = "--set NAME=VALUE changes a setting, `swift settings` lists them"
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {near}" if near else ""))

    def print_help(self, file: Any = None) -> None:
        """Prints the help; raises OSError if it cannot be written, an error that argparse itself ignores."""
        print(self.format_help(), end="", file=file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exits after flushing the output of --help or --version; raises OSError if it cannot be written."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after printing one line on stderr, with a suggestion if there is one."""
        first, self._first = self._first.partition("=")[0], ""
        if (
            first
            and "arguments are required" in message
            and not any(name.startswith(first) for name in _options([self]))
        ):
            self._refuse([first], [self])
        choice = _CHOICE.fullmatch(message)
        if choice:
            known = [word for word in re.findall(r"[\w-]+", choice[3]) if word not in self.hidden]
            word = choice[2].strip("'")
            instead = f"try `swift {self.instead[word]}`" if word in self.instead else ""
            message = f"{choice[1]}; {instead or _did_you_mean(word, known) or 'choose ' + ', '.join(known)}"
        self.exit(2, f"{self.prog}: {printable(message)} (--help lists what is possible)\n")


def _options(parsers: Sequence[argparse.ArgumentParser]) -> list[str]:
    """Returns all options that the help texts of these parsers mention."""
    return [name for parser in parsers for name in re.findall(r"(?<!\w)--[a-z][\w-]+", parser.format_help())]


class ShowVersion(argparse.Action):
    """Prints the versions of Swift, JAX and Python, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        """Looks up the versions only when they are requested."""
        del namespace, values, option_string
        print(f"swift-moe {__version__} (jax {_version('jax')}, Python {platform.python_version()})")
        parser.exit()


def path_of(text: str) -> Path:
    """Converts an option's value to a path; rejects an empty name, a URL, and a name too long for the file system."""
    if not text:
        # ``Path("")`` would mean the working directory.
        raise argparse.ArgumentTypeError("'': must name a file or a directory")
    if _URL.match(text):  # as a path, it would mean a directory named, for example, `gs:`
        raise argparse.ArgumentTypeError(f"{text!r}: is a URL; only local files and directories are supported")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"{text[:60]!r}... ({len(text):,} letters): {error.strerror}") from error
    return Path(text)


def step_of(text: str) -> int | Literal["best"]:
    """Converts an option's value to an iteration, or to ``best``."""
    if text == "best":
        return "best"
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an iteration, or best") from error


def with_suggestion(error: SettingError) -> str:
    """Returns the message of an error; if the error lists choices, appends the one nearest to the given value."""
    listed = re.search(r"\bone of ([\w-]+(?:, [\w-]+)+)$", error.allowed)
    near = _did_you_mean(str(error.value).partition("=")[0], listed[1].split(", ")) if listed else ""
    return f"{error}; {near}" if near else str(error)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``did you mean WORD?`` with the nearest known word, or an empty string if none is near.

    >>> _did_you_mean("trian", ["train", "plan"])
    'did you mean train?'
    >>> _did_you_mean("--steps", ["--set", "--run-dir"])
    ''
    """
    names = {name.lower().lstrip("-"): name for name in known}  # with their dashes, all options would look similar
    near = difflib.get_close_matches(word.lower().lstrip("-"), names, n=1)
    return f"did you mean {names[near[0]]}?" if near else ""


def with_negative_values(arguments: Sequence[str]) -> list[str]:
    """Joins options and their negative values with ``=``; argparse would mistake such a value for another option.

    >>> with_negative_values(["simulate", "--mtbf", "-10m", "--seed", "1"])
    ['simulate', '--mtbf=-10m', '--seed', '1']
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and re.match(r"-\.?\d", argument) and re.fullmatch(r"--[a-z][\w-]*", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
