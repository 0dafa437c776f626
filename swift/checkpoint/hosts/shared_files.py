"""The files of a checkpoint that several hosts write together: each fills in what it has, and checks an equal part.

A file has the values of a whole array, as if one host had written it. So its parts come from several hosts, and one of
them reads it back: it compares every part with what its host had in memory, and takes the digest of the whole.
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from swift.checkpoint.partial.expert_units import StateSplit, Unit, shape_text
from swift.checkpoint.storage.digests import BLOCK, array_checksum, array_digest, synced_digest
from swift.checkpoint.storage.directory import ARRAYS
from swift.checkpoint.storage.manifest import Files
from swift.checkpoint.storage.orbax_files import data_file, files_of, map_array, runs, writing_parts
from swift.checkpoint.storage.verification import equal_part, is_stored, unit_array

Place = tuple[slice, ...]


class Piece(NamedTuple):
    """A piece of an array of a state.

    Attributes:
        name: name of the array.
        place: its place in the array, a slice for each of the first dims.
        values: values of the piece.
    """

    name: str
    place: Place
    values: np.ndarray


@dataclass(frozen=True)
class Filled:
    """Report of one host on what it has written into the files of a checkpoint.

    Attributes:
        places: name of the array of the state and place in it, for each of its pieces.
        checksums: checksums of the values that it had in memory, by name of the stored array.
        num_bytes: bytes of the values.
    """

    places: tuple[tuple[str, Place], ...]
    checksums: Mapping[str, int]
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Fields for ``from_json``."""
        places = [[name, [[one.start, one.stop] for one in place]] for name, place in self.places]
        return {"places": places, "checksums": dict(self.checksums), "num_bytes": self.num_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The same, told by another host."""
        places = tuple((name, tuple(slice(*ends) for ends in place)) for name, place in fields["places"])
        return cls(places, fields["checksums"], fields["num_bytes"])


@dataclass(frozen=True)
class Contents:
    """Digests of stored arrays, each of which is found right.

    Attributes:
        files: digests of the files of each array.
        dense: digests of the values of arrays of the dense part.
        units: digests of the values of experts.
    """

    files: dict[str, Files] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    units: dict[Unit, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Fields for ``adopt``."""
        return {
            "files": self.files,
            "dense": self.dense,
            "units": [[*unit, content] for unit, content in self.units.items()],
        }

    def adopt(self, fields: Mapping[str, Any]) -> None:
        """Takes over what another host has found."""
        self.files.update(fields["files"])
        self.dense.update(fields["dense"])
        self.units.update({(layer, class_): content for layer, class_, content in fields["units"]})


def stored_shapes(split: StateSplit, chosen_LK: np.ndarray) -> dict[str, Any]:
    """Shapes and dtypes of the arrays that a checkpoint of these experts stores, by name."""
    shapes = {name: leaf for name, leaf in split.dense_shapes.items() if is_stored(shape_text(leaf))}
    for unit in _units(chosen_LK):
        shapes.update({unit_array(unit, dtype): shape for dtype, shape in split.unit_shapes.items()})
    return shapes


def fill_in(
    arrays: Path, split: StateSplit, chosen_LK: np.ndarray, pieces: Iterable[Piece], progress: Callable[[], None]
) -> Filled:
    """Writes the pieces that a host has into the files of a checkpoint, and syncs these.

    Args:
        arrays: directory of the arrays, whose files are there without values.
        split: division of the state.
        chosen_LK: classes that are saved.
        pieces: pieces of the state; of experts the classes that are saved, in this order.
        progress: function to call now and then.

    Raises:
        OSError, ValueError: they cannot be written.
    """
    places, parts = [], dict[str, list[tuple[Place, np.ndarray]]]()
    for piece in pieces:
        places.append((piece.name, piece.place))
        for name, place, index in _parts(split, chosen_LK, piece.name, piece.place):
            parts.setdefault(name, []).append((place, piece.values[index]))
    checksums, num_bytes = dict.fromkeys(parts, 0), 0
    for name, parts_of_array in parts.items():  # each file is opened once
        with writing_parts(arrays, name, progress) as write:
            for place, part in parts_of_array:
                values = np.ascontiguousarray(part)
                checksums[name] = array_checksum([values], checksums[name])
                num_bytes += write(place, values)
    return Filled(tuple(places), checksums, num_bytes)


def check_filled(
    arrays: Path,
    split: StateSplit,
    chosen_LK: np.ndarray,
    hosts: Sequence[Filled],
    own: int,
    progress: Callable[[], None],
) -> Contents:
    """Reads those files of a checkpoint back that fall to one of several hosts, by their size.

    Args:
        arrays: directory of the arrays.
        split: division of the state.
        chosen_LK: classes that are saved.
        hosts: what each host has written.
        own: number of this host.
        progress: function to call now and then.

    Returns:
        Digests of these files and of the values in them.

    Raises:
        OSError: some values have not come, or are not those that their host had in memory.
        ValueError: a file is not laid out as it was made.
    """
    shapes, found = stored_shapes(split, chosen_LK), Contents()
    mine = equal_part(_items(split, chosen_LK), own, len(hosts))
    names = [name for item in mine for name in item.arrays]
    places = _places_of(split, chosen_LK, hosts, names)
    for name in names:
        array = map_array(arrays, name)
        if shape_text(array) != shape_text(shapes[name]):
            raise ValueError(f"{name} is {shape_text(shapes[name])} and is stored as {shape_text(array)}")
        _compare(array, name, hosts, places[name], progress)
        folder = files_of(name)
        found.files[name] = {
            f"{ARRAYS}/{folder}/{path.name}": synced_digest(path, progress)
            for path in sorted((arrays / folder).iterdir())
        }
    for item in mine:
        content = _content(arrays, item.arrays, found.files)
        progress()
        if isinstance(item.key, str):
            found.dense[item.key] = content
        else:
            found.units[item.key] = content
    return found


class _Item(NamedTuple):
    """An array of the dense part or an expert, and the stored arrays that have its values."""

    key: str | Unit
    arrays: tuple[str, ...]


def _units(chosen_LK: np.ndarray) -> Iterator[Unit]:
    return ((layer, class_) for layer, classes in enumerate(chosen_LK.tolist()) for class_ in classes)


def _items(split: StateSplit, chosen_LK: np.ndarray) -> Iterator[tuple[int, _Item]]:
    """Everything that is stored, with its bytes."""
    for name, leaf in split.dense_shapes.items():
        if is_stored(shape_text(leaf)):
            yield math.prod(leaf.shape) * leaf.dtype.itemsize, _Item(name, (name,))
    for unit in _units(chosen_LK):
        yield split.unit_bytes, _Item(unit, tuple(unit_array(unit, dtype) for dtype in split.unit_shapes))


def _parts(
    split: StateSplit, chosen_LK: np.ndarray, name: str, place: Place
) -> Iterator[tuple[str, Place, tuple[Any, ...]]]:
    """The parts of stored arrays that a piece fills: (name, place, index into the piece's values)."""
    if name not in split.expert_names:
        yield name, place, ()
        return
    dtype = str(split.shapes[name].dtype)
    nth = split.names_of_type[dtype].index(name)
    stages, stack, ranks, _, values = (*place, *[slice(None)] * (5 - len(place)))
    for row, layers in enumerate(split.layers_of_stages[stages]):
        for at, layer in enumerate(layers[stack]):
            for k, class_ in enumerate(chosen_LK[layer].tolist()):
                of_unit = slice(nth, nth + 1), ranks, values
                yield unit_array((layer, class_), dtype), of_unit, (row, at, slice(None), k)


def _places_of(
    split: StateSplit, chosen_LK: np.ndarray, hosts: Sequence[Filled], names: Iterable[str]
) -> dict[str, list[list[Place]]]:
    """Places that each host has written, in its order, by name of the stored array."""
    places: dict[str, list[list[Place]]] = {name: [[] for _ in hosts] for name in names}
    for host, filled in enumerate(hosts):
        for piece, where in filled.places:
            for name, place, _ in _parts(split, chosen_LK, piece, where):
                if name in places:
                    places[name][host].append(place)
    return places


def _compare(
    array: np.ndarray,
    name: str,
    hosts: Sequence[Filled],
    places: Sequence[Sequence[Place]],
    progress: Callable[[], None],
) -> None:
    """Raises OSError unless an array on the disk is what the hosts had in memory, and nothing else."""
    flat, missing, length = array.reshape(-1), array.size, max(1, BLOCK // array.itemsize)
    for host, (filled, of_host) in enumerate(zip(hosts, places, strict=True)):
        checksum = 0
        for run in (run for place in of_host for run in runs(array.shape, place)):
            for start in range(run.start, run.stop, length):
                checksum = array_checksum([flat[start : min(run.stop, start + length)]], checksum)
                progress()
            missing -= run.stop - run.start
        if checksum != filled.checksums.get(name, 0):
            why = f"the values of {name} are not those that host {host} has saved"
            raise OSError(errno.EIO, f"{why} ({os.strerror(errno.EIO)})")
    if missing:
        raise OSError(f"not all of the state has come: {name}")


def _content(arrays: Path, names: Sequence[str], files: Mapping[str, Files]) -> str:
    """Digest of the values of arrays; the file of a single one has nothing else."""
    if len(names) > 1:
        return array_digest(map_array(arrays, name) for name in names)
    return files[names[0]][f"{ARRAYS}/{data_file(arrays, names[0])}"]
