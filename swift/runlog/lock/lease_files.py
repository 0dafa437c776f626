"""The files of leases: ``.lease-3.json`` is that of the third owner of a run directory."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swift.errors import SettingError
from swift.runlog.lock.lease import Owner

_PREFIX, _SUFFIX = ".lease-", ".json"
_LONGEST = 4096


@dataclass(frozen=True)
class LeaseFile:
    """A lease file as it was read.

    Attributes:
        number: number of the owner, from 1.
        path: path of the file.
        content: its content; empty if this process may not read it.
        beat_ns: time of the last heartbeat, by the clock of the file system, in nanoseconds.
    """

    number: int
    path: Path
    content: bytes
    beat_ns: int

    @property
    def owner(self) -> Owner | None:
        """The owner; None if the content is damaged, not written yet or not readable."""
        return Owner.decode(self.content)


def lease_path(run_dir: Path, number: int) -> Path:
    """Path of the lease of a directory's ``number``-th owner."""
    return run_dir / f"{_PREFIX}{number}{_SUFFIX}"


def make_lease(path: Path, owner: Owner) -> bool:
    """Makes a lease file; returns False if another process has made it.

    Raises:
        SettingError: the directory cannot be written to.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with open(descriptor, "wb") as file:
                file.write(owner.encode())
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        return False
    except OSError as error:  # also a full disk
        raise SettingError("--run-dir", str(path.parent), f"cannot be written to: {error.strerror}") from error
    return True


def read_leases(run_dir: Path) -> list[LeaseFile]:
    """Reads all leases of a directory, the oldest first."""
    names = [path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for path in run_dir.glob(f"{_PREFIX}*{_SUFFIX}")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    found = (read_lease(number, lease_path(run_dir, number)) for number in numbers)
    return [one for one in found if one is not None]


def read_lease(number: int, path: Path) -> LeaseFile | None:
    """Reads a lease; None if it is gone. The file is opened again, so that a network file system asks its server."""
    try:
        with path.open("rb") as file:
            return LeaseFile(number, path, file.read(_LONGEST), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except PermissionError:
        with suppress(FileNotFoundError):
            return LeaseFile(number, path, b"", path.stat().st_mtime_ns)
        return None
    except OSError as error:
        raise SettingError("--run-dir", str(path.parent), f"cannot be read: {error.strerror}") from error


def lease_content(path: Path) -> bytes:
    """Content of a lease file; raises OSError as the file system does."""
    with path.open("rb") as file:
        return file.read(_LONGEST)
