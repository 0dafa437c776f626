"""Serialization of samples: a JSON header that lists the fields, then their contents. Unlike pickle, it runs no code.

A cache in memory copies samples instead, but accepts the same field types.
"""

import copy
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_HEAD = struct.Struct("<I")
_PLAIN = (str, int, float, bool, type(None))


class Unencodable(ValueError):
    """A field that can be neither serialized nor digested; the message says why."""


def encoded(sample: Mapping[str, Any]) -> bytes:
    """Serializes a sample.

    Raises:
        Unencodable: a field is not text, bytes, a number, an array, or lists and mappings of texts and numbers.
    """
    fields, contents = list[Any](), list[bytes]()
    for name, value in sample.items():
        kind, content = _encoded_field(name, value)
        fields.append([name, kind, len(content)])
        contents.append(content)
    head = json.dumps(fields).encode()
    return b"".join([_HEAD.pack(len(head)), head, *contents])


def decoded(content: bytes) -> dict[str, Any]:
    """Deserializes a sample; its arrays own their memory and are writable."""
    (size,) = _HEAD.unpack_from(content)
    place, sample = _HEAD.size + size, dict[str, Any]()
    for name, kind, length in json.loads(content[_HEAD.size : place]):
        part = content[place : place + length]
        place += length
        if kind == "text":
            sample[name] = part.decode("utf-8", errors="surrogatepass")
        elif kind == "bytes":
            sample[name] = part
        elif kind == "plain":
            sample[name] = json.loads(part)
        else:
            sample[name] = _array(part, *kind)
    return sample


def _array(content: bytes, dtype: str, shape: Sequence[int] | None, axes: Sequence[int]) -> Any:
    """Builds an array with the given memory order of its axes, or a NumPy scalar if ``shape`` is None."""
    sizes = [(shape or ())[axis] for axis in axes]
    array = np.frombuffer(content, np.dtype(dtype)).reshape(sizes).copy()
    return array[()] if shape is None else array.transpose(np.argsort(axes).tolist())


def checked_copy(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a sample for a cache in memory, so that later writes to the sample do not change the copy.

    Raises:
        Unencodable: see ``encoded``; caches in memory and in files accept the same fields.
    """
    for name, value in sample.items():
        _check_field(name, value)
    return copied(sample)


def copied(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a sample with its arrays and lists; arrays keep the memory order of their axes, but have no gaps."""
    return {name: _copied(value) for name, value in sample.items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return copy.deepcopy(value) if type(value) in (list, dict) else value
    if value.flags.c_contiguous:
        return np.array(value)
    axes = _axes_in_memory(value)
    return np.array(value.transpose(axes), order="C").transpose(np.argsort(axes).tolist())


def field_bytes(value: Any) -> bytes:
    """Encodes a field such that encodings are equal if and only if the fields are; ignores the memory order of arrays.

    Raises:
        Unencodable: see ``encoded``.
    """
    kind, content = _encoded_field("field", value.copy("C") if isinstance(value, np.ndarray) else value)
    return json.dumps(kind).encode() + content


def _encoded_field(name: str, value: Any) -> tuple[Any, bytes]:
    _check_field(name, value)
    if isinstance(value, str):
        return "text", value.encode("utf-8", errors="surrogatepass")
    if isinstance(value, bytes):
        return "bytes", value
    if isinstance(value, np.ndarray | np.generic):
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        array = np.asarray(value)
        axes = _axes_in_memory(array)
        return [array.dtype.str, shape, axes], np.ascontiguousarray(array.transpose(axes)).tobytes()
    return "plain", json.dumps(value).encode()


def _axes_in_memory(array: np.ndarray) -> list[int]:
    """Returns the axes from the largest stride to the smallest.

    NumPy sums in memory order, so the last bits of a sum over an array depend on it.
    """
    return sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))


def _check_field(name: str, value: Any) -> None:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject or value.dtype.names:
            raise Unencodable(f"field {name!r} is an array of {value.dtype}")
        return
    if not isinstance(value, str | bytes) and not _is_json(value):
        raise Unencodable(f"field {name!r} is a {type(value).__name__}")


def _is_json(value: Any, depth: int = 100) -> bool:
    """Whether JSON gives a value back: texts, numbers, and lists and mappings of them, nested at most so deep."""
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and _is_json(entry, depth - 1) for key, entry in value.items())
    return type(value) in _PLAIN or (type(value) is list and depth > 0 and all(_is_json(v, depth - 1) for v in value))


def num_bytes(value: Any) -> int:
    """Returns a field's or sample's size in bytes; for a field that cannot be encoded, the length of its repr."""
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, np.ndarray | np.generic):
        return int(value.nbytes)  # encoding the array would copy it
    try:
        return len(_encoded_field("field", value)[1])
    except Unencodable:
        return len(repr(value))
