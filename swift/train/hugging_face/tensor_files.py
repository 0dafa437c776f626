"""Directories of safetensors files, with an index where there are several.

Where both a single file and an index are there, the file is read, as ``transformers`` does.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swift.errors import RunError, SettingError
from swift.files import read_regular, sync_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_METADATA = {"format": "pt"}
"""Metadata that ``transformers`` expects of a file; types and order are those of its tensors."""


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a directory; their values are read one by one.

    Attributes:
        directory: the directory.
        file_of: name of the file that holds each tensor.
        shapes: shape of each tensor.
    """

    directory: Path
    file_of: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, directory: Path) -> "TensorFiles":
        """Reads the index and the heads of the files.

        Raises:
            SettingError: a file is missing, cut, or not of this kind, or the index names a tensor that is not there.
        """
        index = directory / INDEX
        file_of = _read_index(index) if index.exists() and not (directory / SINGLE).exists() else None
        shapes: dict[str, tuple[int, ...]] = {}
        found: dict[str, str] = {}
        for name in sorted(set(file_of.values())) if file_of is not None else [SINGLE]:
            with _opened(directory / name) as file:
                for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                    shapes[tensor], found[tensor] = tuple(file.get_slice(tensor).get_shape()), name
        for tensor, name in (file_of or {}).items():
            if found.get(tensor) != name:
                raise SettingError("DIR", str(directory), f"lacks {tensor}, which its index finds in {name}")
        return cls(directory, found, shapes)

    def read(self, *names: str) -> Iterator[tuple[str, np.ndarray]]:
        """Reads tensors, all unless some are named, file by file, in the type they are stored in."""
        wanted = set(names or self.file_of)
        for name in sorted({self.file_of[tensor] for tensor in wanted}):
            with _opened(self.directory / name) as file:
                for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                    if tensor in wanted:
                        yield tensor, file.get_tensor(tensor)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], sizes: Sequence[int], most: int) -> None:
    """Writes tensors in files of a limited size, and the index where there are several; each is read back.

    Args:
        directory: existing directory.
        tensors: name and value of each tensor, made when it is needed.
        sizes: bytes of each tensor.
        most: bytes of a file, unless a single tensor is larger.

    Raises:
        OSError: a file cannot be written.
        RunError: a file does not hold what was written.
    """
    counts = _counts(sizes, most)
    names = [SINGLE]
    if len(counts) > 1:
        names = [f"model-{number:05}-of-{len(counts):05}.safetensors" for number in range(1, len(counts) + 1)]
    weight_map: dict[str, str] = {}
    ordered = iter(tensors)
    for name, count in zip(names, counts, strict=True):
        held = dict(next(ordered) for _ in range(count))
        _write(directory / name, held)
        weight_map |= dict.fromkeys(held, name)
    if len(counts) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _counts(sizes: Sequence[int], most: int) -> list[int]:
    """Number of tensors of each file."""
    counts, used = [0], 0
    for size in sizes:
        if counts[-1] and used + size > most:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return counts


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path, metadata=_METADATA)
    except SafetensorError as error:
        raise RunError(f"{path}: cannot be written: {error}") from error
    sync_file(path)
    with _opened(path) as file:
        for name, value in tensors.items():
            if not np.array_equal(file.get_tensor(name).view(np.uint8), value.view(np.uint8)):
                raise RunError(f"{path}: {name} was not written as it is in memory: try again")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file of the directory that holds a JSON object; raises SettingError where it does not."""
    try:
        said = json.loads(read_regular(path))
    except OSError as error:
        raise SettingError("DIR", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError("DIR", str(path), f"is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise SettingError("DIR", str(path), "is not a JSON object")
    return said


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SettingError("DIR", str(path), "has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise SettingError(
                "DIR", str(path), f"finds {tensor} in {name!r}, which is not the name of a file beside it"
            )
    return weight_map


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        allowed = "needs the extra 'hf': pip install 'swift-moe[hf]'"
        raise SettingError("DIR", str(path.parent), allowed) from None
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise SettingError("DIR", str(path), "is missing") from error
    except OSError as error:
        raise SettingError("DIR", str(path), f"cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SettingError("DIR", str(path), f"is not a whole safetensors file: {error}") from error
