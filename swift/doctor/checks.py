"""Checks of one machine: packages, cores and memory, the run directory, and the machine's own address.

The checks try out what a run will do: they write to the directory as a run does, and listen on the address.
"""

import importlib.metadata
import ipaddress
import os
import platform
import resource
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from swift import DISTRIBUTION, __version__
from swift.elastic.device_probe import Finding
from swift.files import new_directory, replace_file, sync_directory
from swift.machine import cores_allowed, cores_limit, memory_rooms, size_text

_DIRECTORY_TOPIC = "directory"
_DEADLINE_S = 60.0
_SLOW_S, _CLOCKS_APART_S = 1.0, 2.0
_OVER_NETWORKS = ("nfs", "cifs", "lustre", "gpfs", "ceph", "9p", "fuse", "beegfs")

_LEAST_SHARED = 1 << 30
_LEAST_FILES = 1024

_NETWORK_TOPIC = "network"
_CONNECT_S = 5.0

_SOFTWARE_TOPIC = "software"


def examine_directory(run_dir: Path, root: Path = Path("/"), deadline_s: float = _DEADLINE_S) -> Iterator[Finding]:
    """Checks the run directory, or its nearest existing parent, with temporary files.

    Args:
        run_dir: run directory, which need not exist yet.
        root: root of the file system, for the list of mounts.
        deadline_s: seconds after which the check gives up on a file system that does not respond.
    """
    findings: list[Finding] = []
    # In a thread, since a stalled file system (such as a hard NFS mount) blocks its caller forever.
    thread = threading.Thread(target=lambda: findings.extend(_examined(run_dir, root)), daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        yield Finding(
            _DIRECTORY_TOPIC, "missing", f"{run_dir}: its file system does not answer within {deadline_s:.0f} s"
        )
    else:
        yield from findings


def _existing(path: Path) -> Path:
    """Returns a path, or its nearest parent that exists as a directory."""
    path = path.absolute()
    return next(ancestor for ancestor in (path, *path.parents) if ancestor.is_dir())


def _examined(run_dir: Path, root: Path) -> Iterator[Finding]:
    try:
        directory = _existing(run_dir)
        trial = directory / f".swift-doctor-{secrets.token_hex(8)}"
        trial.mkdir()
    except OSError as error:
        yield Finding(_DIRECTORY_TOPIC, "missing", f"{run_dir} cannot be written to: {error.strerror}")
        return
    try:
        start_time = time.monotonic()
        for what, try_it in _TRIALS.items():
            try:
                try_it(trial)
            except OSError as error:
                yield Finding(_DIRECTORY_TOPIC, "missing", f"in {directory} a run cannot {what}: {error.strerror}")
                return
        yield from _of_speed(directory, root, time.monotonic() - start_time)
        yield from _of_clock(trial)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _of_speed(directory: Path, root: Path, seconds: float) -> Iterator[Finding]:
    stats, kind = os.statvfs(directory), _file_system(directory, root / "proc/self/mountinfo")
    text = f"{directory}: {kind}, {size_text(stats.f_bavail * stats.f_frsize)} free"
    if seconds > _SLOW_S:
        yield Finding(_DIRECTORY_TOPIC, "note", f"{text}; a few small files took {seconds:.1f} s: saves will be slow")
    elif kind.startswith(_OVER_NETWORKS):
        yield Finding(_DIRECTORY_TOPIC, "note", f"{text}; no run of several machines has been tried on {kind}")
    else:
        yield Finding(_DIRECTORY_TOPIC, "ok", text)


def _of_clock(trial: Path) -> Iterator[Finding]:
    """Compares this machine's clock with the file system's, which may be on a server."""
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
    with new_directory(trial / "made") as directory:
        (directory / "file").write_bytes(b"content")
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
"""Operations that a run needs in its directory: for its record, its checkpoints and its lease."""


def _file_system(directory: Path, mounts: Path) -> str:
    """Returns the type of a directory's file system, from the deepest mount point above the directory."""
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines() if mounts.is_file() else ():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if (point == directory or point in directory.parents) and len(point.parts) > best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def examine_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Checks the cores, memory and open files that the kernel, and the container if there is one, allow a run.

    Args:
        root: root of the file system.
    """
    cores, quota = cores_allowed(), cores_limit(root)
    if quota is not None and quota < cores:
        yield Finding("cores", "note", f"{cores}, of which this container may use {quota:.1f} at a time")
    else:
        yield Finding("cores", "ok", f"{cores}")
    machine, *groups = [room.size for room in memory_rooms(root)] or [0]
    smallest = min([machine, *groups])
    text = size_text(smallest)
    yield Finding("memory", "ok", f"{text}, this container's limit" if smallest < machine else text)
    yield _shared_memory(root / "dev/shm")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _LEAST_FILES:
        text = f"{files} open files allowed; {_LEAST_FILES} are enough for dozens of processes: ulimit -n {most}"
        yield Finding("files", "note", text)
    else:
        yield Finding("files", "ok", f"{files} open files allowed")


def _shared_memory(path: Path) -> Finding:
    elsewhere = f"states of `launch` would be in {tempfile.gettempdir()}, which is slower"
    if not path.is_dir():
        return Finding("shm", "note", f"there is no {path}: {elsewhere}")
    stats = os.statvfs(path)
    total, free = (stats.f_frsize * blocks for blocks in (stats.f_blocks, stats.f_bavail))
    text = f"{size_text(free)} of {size_text(total)} free in {path}"
    if free >= _LEAST_SHARED:
        return Finding("shm", "ok", text)
    remedy = "a container gets more with --shm-size, a pod with a volume in memory"
    return Finding("shm", "note", f"{text}; where three states of all processes do not fit, {elsewhere}: {remedy}")


def examine_network(host: str, *, is_alone: bool, is_chosen: bool) -> Iterator[Finding]:
    """Checks an address of this machine: listens on it and connects to it.

    Args:
        host: address at which the other machines find this one.
        is_alone: whether there are no other machines, so that an address that only this machine reaches is acceptable.
        is_chosen: whether the user gave the address, rather than it being looked up by the machine's name.
    """
    try:
        with socket.create_server((host, 0)) as listener:
            socket.create_connection(listener.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        yield Finding(_NETWORK_TOPIC, "missing", f"{host} cannot be listened on and reached from here: {error}")
        return
    if not ipaddress.ip_address(host).is_loopback:
        yield Finding(_NETWORK_TOPIC, "ok", f"this machine is {host}, which can be listened on")
    elif is_chosen:
        yield Finding(_NETWORK_TOPIC, "note", f"{host} is reached by this machine alone")
    else:
        remedy = "a run on several needs --listen HOST" if is_alone else "see /etc/hosts, or give --listen HOST"
        text = f"this machine's name stands for {host}, which no other machine reaches: {remedy}"
        yield Finding(_NETWORK_TOPIC, "note" if is_alone else "missing", text)


def examine_software() -> Iterator[Finding]:
    """Compares the installed packages with the requirements in Swift's metadata."""
    try:
        needs = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{DISTRIBUTION} is not installed, Swift runs from its files: versions of packages are not compared"
        yield Finding(_SOFTWARE_TOPIC, "note", text)
        needs = []
    yield from judge_packages(needs, importlib.metadata.version)


def judge_packages(needs: Iterable[str], version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Compares the versions of packages with requirements.

    Args:
        needs: requirements as in a package's metadata; requirements of extras are ignored.
        version_of: returns the version of an installed package, or raises PackageNotFoundError.
    """
    versions, has_faults = dict[str, str](), False
    for requirement in map(Requirement, needs):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = versions[requirement.name] = version_of(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            has = "is not installed" if version is None else f"is {version}"
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(_SOFTWARE_TOPIC, "missing", f"{requirement.name} {has}: {remedy}")
            has_faults = True
    if not has_faults:
        main = "".join(f", {name} {versions[name]}" for name in ("jax", "numpy") if name in versions)
        yield Finding(_SOFTWARE_TOPIC, "ok", f"Swift {__version__}, Python {platform.python_version()}{main}")
