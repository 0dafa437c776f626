"""The pieces of a state that several hosts have, brought together for a checkpoint by files that they share.

Each host writes its pieces; the first one waits for those of all and reads them. Threads do that while training
continues, so no collective takes part, which would have to be in the order of the iterations.

    .step-00000040.5f0c.pieces.tmp/host-1/manifest.json    names, places, types, shapes and checksums of host 1's pieces
    .step-00000040.5f0c.pieces.tmp/host-1/values           their bytes, one piece after the other
    .step-00000040.5f0c.pieces.tmp/host-1.failed           why host 1 has none, in place of these

A save has a token, 5f0c, so that one that is repeated does not find the pieces of the last attempt. The next save, or
the next start of the run, removes what is left of them.
"""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from swift.checkpoint.storage.digests import array_checksum, raw_bytes
from swift.checkpoint.storage.directory import checkpoint_path
from swift.checkpoint.storage.manifest import read_signed, write_signed
from swift.errors import SettingError
from swift.files import check_room, new_directory, replace_file, sync_file

_PATIENCE_S, _LOOK_S = 120.0, 0.05
_VALUES, _ENDING, _VERSION = "values", ".pieces.tmp", 1


class Save(NamedTuple):
    """A save, by the name that it has for all hosts.

    Attributes:
        step: iterations done.
        token: what distinguishes it from another save of the same state.
    """

    step: int
    token: str


class Piece(NamedTuple):
    """A piece of an array of a state.

    Attributes:
        name: name of the array.
        place: its place in the array, a slice for each of the first dims.
        values: values of the piece.
    """

    name: str
    place: tuple[slice, ...]
    values: np.ndarray


def write_pieces(directory: Path, save: Save, host: int, pieces: Sequence[Piece]) -> None:
    """Writes the pieces of a host, under a temporary name until all are there; those of its earlier saves are removed.

    Args:
        directory: directory of all checkpoints of a run.
        save: the save.
        host: number of this host.
        pieces: its pieces.

    Raises:
        OSError: they could not be written.
    """
    path = _path(directory, save, host)
    for name in (path.name, f".{path.name}.*.tmp"):
        for old in directory.glob(f".*{_ENDING}/{name}"):
            shutil.rmtree(old, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path.parent, sum(piece.values.nbytes for piece in pieces))
    with new_directory(path) as temporary:
        with (temporary / _VALUES).open("wb") as file:
            for piece in pieces:
                file.write(raw_bytes(piece.values))
        sync_file(temporary / _VALUES)
        write_signed(temporary, {"version": _VERSION, "pieces": [_fields(piece) for piece in pieces]})


def give_up(directory: Path, save: Save, host: int, why: str) -> None:
    """Tells the first host, where that is possible, that it waits in vain for the pieces of this one."""
    marker = _marker(_path(directory, save, host))
    with suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        replace_file(marker, why.encode())


def read_pieces(directory: Path, save: Save, num_hosts: int, patience_s: float = _PATIENCE_S) -> Iterator[Piece]:
    """Reads the pieces of all hosts, and removes their files once all are read.

    Args:
        directory: directory of all checkpoints of a run.
        save: the save.
        num_hosts: number of hosts.
        patience_s: seconds in which the files of a host have to grow, until they are whole.

    Yields:
        Every piece, after its checksum was found right.

    Raises:
        OSError: the pieces of a host did not come in time, or are damaged.
    """
    for host in range(num_hosts):
        path = _path(directory, save, host)
        _wait_for(path, f"host {host} has not written its pieces of iteration {save.step}", patience_s)
        yield from _read(path)
    shutil.rmtree(_path(directory, save, 0).parent, ignore_errors=True)


def _wait_for(path: Path, complaint: str, patience_s: float) -> None:
    """Waits until a directory has its name, which is given to it once it is whole."""
    until, before = time.monotonic() + patience_s, 0
    while not path.exists():
        if _marker(path).exists():
            raise OSError(f"{complaint}: {_marker(path).read_text()}")
        written = _written(path)
        if written > before:
            until, before = time.monotonic() + patience_s, written
        if time.monotonic() > until:
            raise TimeoutError(f"{complaint} in {patience_s:g} s")
        time.sleep(_LOOK_S)


def _written(path: Path) -> int:
    """Bytes of values that have been written under temporary names."""
    sizes = []
    for values in path.parent.glob(f".{path.name}.*.tmp/{_VALUES}"):
        with suppress(OSError):  # it has got its name meanwhile
            sizes.append(values.stat().st_size)
    return sum(sizes)


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


def _path(directory: Path, save: Save, host: int) -> Path:
    return directory / f".{checkpoint_path(directory, save.step).name}.{save.token}{_ENDING}" / f"host-{host}"


def _fields(piece: Piece) -> dict[str, object]:
    return {
        "name": piece.name,
        "place": [[one.start, one.stop] for one in piece.place],
        "dtype": str(piece.values.dtype),
        "shape": piece.values.shape,
        "checksum": array_checksum([piece.values]),
    }


def _read(path: Path) -> Iterator[Piece]:
    try:
        with (path / _VALUES).open("rb") as file:
            for fields in read_signed(path, "pieces", _VERSION)["pieces"]:
                dtype, shape = jnp.dtype(fields["dtype"]), tuple(fields["shape"])
                values = np.fromfile(file, np.uint8, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
                if array_checksum([values]) != fields["checksum"]:
                    raise OSError(f"{path / _VALUES} is not as it was saved: {fields['name']} has other values")
                yield Piece(fields["name"], tuple(slice(*ends) for ends in fields["place"]), values)
    except SettingError as error:
        raise OSError(f"{error.value} {error.allowed}") from error
    except ValueError as error:
        raise OSError(f"{path / _VALUES} is not as it was saved: {error}") from error
