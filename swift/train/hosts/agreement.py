"""Agreement among the hosts of a run, between its iterations: what one host finds, all of them act on.

What is said goes through the devices of all hosts, so all have to say something, in the same order. A host that is
gone leaves the others waiting: JAX's heartbeats end them, see ``swift.cli.console.watching``.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from swift.errors import RunError, SettingError

_SEEN_S = 30.0
"""Seconds in which a new file has to be seen on all hosts."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, from the side of one of them.

    Attributes:
        count: number of hosts.
        own: number of this one, from 0; the first one keeps the record.
    """

    count: int = 1
    own: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this host keeps the record."""
        return self.own == 0

    def gather(self, value: Any) -> list[Any]:
        """Tells all hosts a value that JSON can hold; returns those of all hosts, in their order."""
        if self.count == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(text.size)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: text.size] = text
        texts = multihost_utils.process_allgather(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes.tolist(), strict=True)]

    def of_first(self, value: Any) -> Any:
        """Tells all hosts what the first one has, which JSON can hold; returns that."""
        return self.gather(value)[0]

    def any(self, value: bool) -> bool:
        """Returns whether something is so on any host."""
        return value if self.count == 1 else bool(multihost_utils.process_allgather(np.bool_(value)).any())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of what each host does by itself, which succeeds on all of them or fails on all of them.

        Raises:
            SettingError, RunError: what this host raised, or what another one did, with its number.
        """
        error: SettingError | RunError | None = None
        try:
            yield
        except (SettingError, RunError) as raised:
            if self.count == 1:
                raise
            error = raised
        if self.count == 1:
            return
        told = self.gather(None if error is None else _fields(error))
        if any(told):
            self.separate()
            raise error or _error(*next((host, fields) for host, fields in enumerate(told) if fields))

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raises SettingError on all hosts unless all have the same facts; values are JSON."""
        everyone = self.gather(dict(facts))
        for host, theirs in enumerate(everyone):
            for name in sorted(everyone[0].keys() | theirs.keys()):
                value = everyone[0].get(name)
                if theirs.get(name) != value:
                    self.separate()
                    allowed = f"host 0 has {value!r}: all hosts of a run need the same"
                    raise SettingError(f"host {host}: {name}", theirs.get(name), allowed)

    def check_shared(self, directory: Path) -> None:
        """Raises SettingError on all hosts unless all see the same directory, which is there on the first."""
        if self.count == 1:
            return
        (name, *_) = self.gather(f".seen-by-hosts-{secrets.token_hex(8)}")
        mark, until = directory / name, time.monotonic() + _SEEN_S
        try:
            with self.together():
                if self.is_first:
                    _touch(mark)
            with self.together():
                while not mark.exists():  # a network file system may take its time
                    if time.monotonic() > until:
                        allowed = "is not the directory that host 0 has: all hosts need one that they share"
                        raise SettingError("--run-dir", str(directory), allowed)
                    time.sleep(0.1)
        finally:
            if self.is_first:
                mark.unlink(missing_ok=True)

    def separate(self) -> None:
        """Leaves the other hosts, which do the same now: then each may end when it likes."""
        if self.count > 1:
            self.gather(None)  # what another one does before may take longer than JAX waits
            jax.distributed.shutdown()


ALONE = Hosts()
"""A run on one host."""


def _fields(error: SettingError | RunError) -> list[str]:
    if isinstance(error, SettingError):
        return ["setting", error.setting, str(error.value), error.allowed]
    return ["run", str(error)]


def _error(host: int, fields: list[str]) -> SettingError | RunError:
    kind, *words = fields
    if kind == "run":
        return RunError(f"host {host}: {words[0]}")
    return SettingError(f"host {host}: {words[0]}", *words[1:])


def _touch(path: Path) -> None:
    """Makes an empty file in the run directory."""
    try:
        path.touch()
    except OSError as error:
        raise SettingError("--run-dir", str(path.parent), f"cannot be written to: {error.strerror}") from error
