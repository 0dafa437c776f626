"""Rescue of a checkpoint that cannot be written to its run directory: kept elsewhere until ``--resume`` takes it back.

The refuge follows from the run alone, since a full or read-only disk cannot hold a note of it. A file there names the
directory of the run: a run may be moved to another disk, and a copy of a run is another run.
"""

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from swift.checkpoint.storage.digests import digest, synced_digests
from swift.checkpoint.storage.directory import begin_save, checkpoint_path, checkpoint_steps, commit_save
from swift.checkpoint.storage.manifest import MANIFEST, read_manifest
from swift.errors import RunError, SettingError
from swift.runlog.events import EVENTS

_MEMORY = Path("/dev/shm")
_PREFIX, _ORIGIN = "kept-by-swift", "origin"


def refuges(checkpoints: Path) -> list[Path]:
    """Returns refuges: directories for checkpoints of a run that cannot be written to its own, the best first.

    Args:
        checkpoints: directory of the run's checkpoints.
    """
    path = digest(f"{checkpoints.resolve()}".encode())
    return [top / f"{_name(checkpoints)}-{path[:16]}" for top in _tops()]


def keep_elsewhere(checkpoints: Path, step: int, write: Callable[[Path], object]) -> str:
    """Writes a checkpoint to the first of ``refuges`` that can hold it.

    Args:
        checkpoints: directory of the run's checkpoints.
        step: iterations done.
        write: function that writes it into a directory for checkpoints.

    Returns:
        A phrase on the refuge, and on how to resume from it.

    Raises:
        RunError: none can hold it; the message says why.
    """
    troubles = []
    for refuge in refuges(checkpoints):
        try:
            refuge.mkdir(mode=0o700, exist_ok=True)
            if not _is_own(refuge):
                raise PermissionError("belongs to somebody else")
            (refuge / _ORIGIN).write_text(f"{checkpoints.resolve()}", encoding="utf-8")
            write(refuge)
        except Exception as error:  # whatever the reason: the next may hold it
            troubles.append(f"{refuge}: {' '.join(str(error).split())}")
            if not checkpoint_steps(refuge) and _is_own(refuge):
                shutil.rmtree(refuge, ignore_errors=True)
            continue
        memory = ", which is memory and does not outlast a restart of the machine" if refuge.parent == _MEMORY else ""
        return (
            f"the state after iteration {step} is kept in {refuge} on {socket.gethostname()}{memory}; make room, then "
            f"resume there with --run-dir {checkpoints.parent} --resume, which takes it from that directory"
        )
    raise RunError("; ".join(troubles))


def take_back(checkpoints: Path) -> list[str]:
    """Moves a checkpoint that was kept elsewhere to the others of its run, if it is the newest.

    Args:
        checkpoints: directory of the run's checkpoints.

    Returns:
        Lines on checkpoints that were moved or passed over.

    Raises:
        RunError: it still cannot be written.
    """
    lines = []
    for refuge in dict.fromkeys((*filter(_is_own, refuges(checkpoints)), *_left_behind(checkpoints))):
        step = max(checkpoint_steps(refuge), default=0)
        if step > max(checkpoint_steps(checkpoints), default=0):
            try:
                _copy(refuge, checkpoints, step)
            except SettingError as error:  # damaged: the run may resume from an older one
                lines.append(f"passed over: {refuge / checkpoint_path(refuge, step).name} {error.allowed}")
                continue
            except OSError as error:
                where = (
                    f"the state after iteration {step}, which is kept in {refuge}, cannot be brought to {checkpoints}"
                )
                raise RunError(f"{where}: {error.strerror or error}: make room, then --resume again") from error
            lines.append(f"the checkpoint of iteration {step} was kept in {refuge} and is now in {checkpoints}")
        shutil.rmtree(refuge, ignore_errors=True)
    return lines


def _copy(refuge: Path, checkpoints: Path, step: int) -> None:
    """Copies a checkpoint and reads the copy back before it counts; raises SettingError if it is damaged."""
    source = checkpoint_path(refuge, step)
    manifest = read_manifest(source, "checkpoint")
    temporary = begin_save(checkpoints, step)
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        found, needed = synced_digests(temporary), manifest.files_needed()[step]
        wrong = [name for name, expected in needed.items() if found.get(name) != expected]
        if wrong:
            raise SettingError("checkpoint", str(source), f"is damaged: its file {wrong[0]} is not as it was saved")
        assert MANIFEST in found
        commit_save(checkpoints, step)
    except shutil.Error as error:  # of several files
        raise OSError(str(error.args[0][0][2])) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tops() -> list[Path]:
    return [top for top in (Path(tempfile.gettempdir()), _MEMORY) if top.is_dir()]


def _name(checkpoints: Path) -> str:
    """Prefix of the names of a run's refuges, wherever its directory is."""
    return f"{_PREFIX}-{os.getuid()}-{digest(_begun(checkpoints.parent / EVENTS).encode())[:16]}"


def _left_behind(checkpoints: Path) -> list[Path]:
    """Finds the refuges of a run that has been moved since."""
    if not _begun(checkpoints.parent / EVENTS):
        return []
    found = [refuge for top in _tops() for refuge in sorted(top.glob(f"{_name(checkpoints)}-*")) if _is_own(refuge)]
    return [refuge for refuge in found if _is_for(refuge, checkpoints.resolve())]


def _is_for(refuge: Path, checkpoints: Path) -> bool:
    """Whether a refuge belongs to this directory or, as far as is known, to it before it was moved."""
    try:
        origin = Path((refuge / _ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return origin.resolve() == checkpoints or not origin.parent.exists()


def _is_own(refuge: Path) -> bool:
    """Whether a directory exists that no other user can have filled."""
    try:
        found = refuge.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _begun(events: Path) -> str:
    """Returns the start of a run, so that a new run in an old directory does not take a checkpoint of the old one."""
    try:
        with events.open("rb") as file:
            return str(json.loads(file.readline()).get("time"))
    except (OSError, ValueError, AttributeError):
        return ""
