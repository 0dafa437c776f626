"""A trial of the directory that runs shall be written to: what a run does there is done once."""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swift.files import new_directory, replace_file, sync_directory
from swift.machine_memory import size_text
from swift.tools.doctor.finding import Finding

_TOPIC = "directory"
_DEADLINE_S = 60.0
_SLOW_S, _CLOCKS_APART_S = 1.0, 2.0
_OVER_NETWORKS = ("nfs", "cifs", "lustre", "gpfs", "ceph", "9p", "fuse", "beegfs")


def examine_directory(run_dir: Path, root: Path = Path("/"), deadline_s: float = _DEADLINE_S) -> Iterator[Finding]:
    """Tries the nearest directory that exists; leaves nothing there.

    Args:
        run_dir: directory of a run, which may not exist yet.
        root: root of the file system, for its list of mounts.
        deadline_s: seconds until a file system that does not answer is given up.
    """
    found: list[Finding] = []
    # A file system that stalls would hold this thread for ever.
    thread = threading.Thread(target=lambda: found.extend(_examined(run_dir, root)), daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        yield Finding(_TOPIC, "missing", f"{run_dir}: its file system does not answer within {deadline_s:.0f} s")
    else:
        yield from found


def existing(path: Path) -> Path:
    """Returns the nearest directory that exists, of a path and those above it."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _examined(run_dir: Path, root: Path) -> Iterator[Finding]:
    try:
        directory = existing(run_dir)
        trial = directory / f".swift-doctor-{secrets.token_hex(8)}"
        trial.mkdir()
    except OSError as error:
        yield Finding(_TOPIC, "missing", f"{run_dir} cannot be written to: {error.strerror}")
        return
    try:
        begun = time.monotonic()
        for what, try_it in _TRIALS.items():
            try:
                try_it(trial)
            except OSError as error:
                yield Finding(_TOPIC, "missing", f"in {directory} a run cannot {what}: {error.strerror}")
                return
        yield from _of_speed(directory, root, time.monotonic() - begun)
        yield from _of_clock(trial)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _of_speed(directory: Path, root: Path, seconds: float) -> Iterator[Finding]:
    found, kind = os.statvfs(directory), _file_system(directory, root / "proc/self/mountinfo")
    text = f"{directory}: {kind}, {size_text(found.f_bavail * found.f_frsize)} free"
    if seconds > _SLOW_S:
        yield Finding(_TOPIC, "note", f"{text}; a few small files took {seconds:.1f} s: saves will be slow")
    elif kind.startswith(_OVER_NETWORKS):
        yield Finding(_TOPIC, "note", f"{text}; no run of several machines has been tried on {kind}")
    else:
        yield Finding(_TOPIC, "ok", text)


def _of_clock(trial: Path) -> Iterator[Finding]:
    """Compares this machine's clock with that of the file system's, which may be another machine's."""
    (trial / "clock").write_bytes(b"")
    apart = (trial / "clock").stat().st_mtime - time.time()
    if abs(apart) > _CLOCKS_APART_S:
        text = f"the file system's is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
        yield Finding("clock", "note", f"{text}: records of a run will have times that do not agree")


def _replace(trial: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(trial / "file", content)
    if (trial / "file").read_bytes() != b"new":
        raise OSError(0, "a file that was replaced still has its old content")


def _rename_directory(trial: Path) -> None:
    with new_directory(trial / "made") as made:
        (made / "file").write_bytes(b"content")
    sync_directory(trial)


def _make_once(trial: Path) -> None:
    os.close(os.open(trial / "once", os.O_CREAT | os.O_EXCL))
    try:
        os.close(os.open(trial / "once", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise OSError(0, "two processes could make the same file")


_TRIALS: dict[str, Callable[[Path], None]] = {
    "replace files": _replace,
    "rename directories": _rename_directory,
    "own its directory": _make_once,
}
"""Uses that a run makes of its directory, for its record, its checkpoints and its lease."""


def _file_system(directory: Path, mounts: Path) -> str:
    """Kind of the file system of a directory: that of the longest mount point above it."""
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines() if mounts.is_file() else ():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if (point == directory or point in directory.parents) and len(point.parts) > best:
            best, kind = len(point.parts), after.split()[0]
    return kind
