"""Trimming of serialized XLA:CPU executables: without what only the compiler needs, they load in a third of the time.

Off unless asked for (``swift launch --trim-executables``), since it edits a format that is XLA's own.

A serialized program has its machine code, its thunks, and the HLO module that both were made from. Nearly all of the
time to load it goes into that module (jaxlib 0.10.2): it is built three times, copied, analysed and printed. Most of it
is the bodies of fusions, each of which is a compiled kernel by then, and only the name, operands and result of a fusion
are still used. So a fusion becomes a custom call of an unknown target, and its body is removed, as is the metadata on
where instructions come from. Everything that runs stays the same, byte for byte.

Before, and after::

    f = fusion(a, b), kind=kLoop, calls=fused_computation      f = custom-call(a, b), custom_call_target="fusion"

The format is protocol buffers inside a pickle; the numbers below are the field numbers of XLA's ``hlo.proto``. It may
change, and a program that does not fit can crash the process that loads it. So only programs of jaxlib versions that
were tried are changed, and only where everything is found as expected.
"""

import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jaxlib

_TRIED = ("0.10.2", "0.12.0")
_UNFRAMED = 64 * 1024
"""Strings of at least this many bytes are outside a pickle's frames, whose lengths do not change then; smaller programs
are left as they are."""

_TO_MODULE = (1, 1, 1)
"""The path of fields from a program to its module: the executable, the module with its configuration, the module."""
_COMPUTATIONS, _ENTRY, _SCHEDULE, _STACK_FRAMES = 3, 6, 7, 17  # of HloModuleProto
_SEQUENCES, _SEQUENCE_OF = 1, 1  # of HloScheduleProto
_INSTRUCTIONS, _ID = 2, 5  # of HloComputationProto
_OPCODE, _METADATA, _FUSION_KIND, _TARGET, _CALLED, _BACKEND_CONFIG = 2, 7, 11, 28, 38, 43  # of HloInstructionProto

_Change = Callable[[bytes], bytes | None]


class _Field(NamedTuple):
    """A field of a message; ``whole`` is its encoding, with its number."""

    number: int
    value: Any
    whole: bytes


def trimmed(payload: bytes) -> bytes:
    """A program that loads faster and runs the same; unchanged where its format is not the expected one.

    Args:
        payload: program for CPU devices, as ``jax.experimental.serialize_executable`` returns it.
    """
    if not jaxlib.__version__.startswith(_TRIED):
        return payload
    try:
        for (_, program, begin), (_, _, end) in pairwise(pickletools.genops(payload)):
            if isinstance(program, bytes) and len(program) >= _UNFRAMED:
                less = _program(program)
                return payload[:begin] + pickle.BINBYTES8 + len(less).to_bytes(8, "little") + less + payload[end:]
    except (ValueError, IndexError, TypeError):
        return payload
    return payload


def _program(program: bytes) -> bytes:
    size, at = _varint(program, 0)  # of a header
    at += size
    return program[:at] + _within(program[at:], _TO_MODULE, _module)


def _within(message: bytes, path: Sequence[int], change: Callable[[bytes], bytes]) -> bytes:
    """A message with the field at a path changed; each field on the path has to occur once."""
    if not path:
        return change(message)
    (_,) = _values(message, path[0])
    return _changed(message, {path[0]: lambda part: _within(part, path[1:], change)})


def _module(module: bytes) -> bytes:
    computations = _values(module, _COMPUTATIONS)
    instructions = [found for computation in computations for found in _values(computation, _INSTRUCTIONS)]
    insides = {body for found in instructions if _is_kernel(found) for body in _called(found)}
    (entry,) = _values(module, _ENTRY)
    if entry in insides or entry not in [_number(computation, _ID) for computation in computations]:
        raise ValueError("not a module")

    def lean(computation: bytes) -> bytes | None:
        is_inside = _number(computation, _ID) in insides
        return None if is_inside else _changed(computation, {_INSTRUCTIONS: _instruction})

    def sequence(sequence: bytes) -> bytes | None:
        return None if _number(sequence, _SEQUENCE_OF) in insides else sequence

    def schedule(schedule: bytes) -> bytes:
        return _changed(schedule, {_SEQUENCES: sequence})

    return _changed(module, {_COMPUTATIONS: lean, _SCHEDULE: schedule, _STACK_FRAMES: _nothing})


def _instruction(instruction: bytes) -> bytes:
    lean = _changed(instruction, {_METADATA: _nothing})
    if not _is_kernel(instruction):
        return lean
    other = dict.fromkeys((_FUSION_KIND, _CALLED, _BACKEND_CONFIG), _nothing)
    return _changed(lean, {_OPCODE: lambda _: b"custom-call", **other}) + _written(_TARGET, b"fusion")


def _is_kernel(instruction: bytes) -> bool:
    """Whether an instruction is a compiled fusion; fusions of other kinds are compiled from their HLO on loading."""
    return _values(instruction, _OPCODE) == [b"fusion"] and _values(instruction, _FUSION_KIND) == [b"kLoop"]


def _called(instruction: bytes) -> Iterator[int]:
    for numbers in _values(instruction, _CALLED):
        at = 0
        while at < len(numbers):
            number, at = _varint(numbers, at)
            yield number


def _nothing(_: bytes) -> None:
    """Removes a field."""


def _changed(message: bytes, changes: Mapping[int, _Change]) -> bytes:
    """A message with the values of some fields changed; fields changed to None are removed."""
    parts = []
    for field in _fields(message):
        value = changes[field.number](field.value) if field.number in changes else None
        if field.number not in changes:
            parts.append(field.whole)
        elif value is not None:
            parts.append(_written(field.number, value))
    return b"".join(parts)


def _values(message: bytes, number: int) -> list[Any]:
    return [field.value for field in _fields(message) if field.number == number]


def _number(message: bytes, number: int) -> int:
    """The value of an integer field, which is not encoded where it is 0."""
    (value,) = _values(message, number) or [0]
    return int(value)


def _fields(message: bytes) -> Iterator[_Field]:
    at = 0
    while at < len(message):
        begin = at
        value: Any = None
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        if at > len(message) or kind not in (0, 1, 2, 5) or not key >> 3:
            raise ValueError("not a message")
        yield _Field(key >> 3, value, message[begin:at])


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint at a position, and the position after it."""
    number = shift = 0
    while True:
        byte = message[at]
        at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
        if byte < 128:
            return number, at


def _written(number: int, value: bytes) -> bytes:
    return _as_varint(number << 3 | 2) + _as_varint(len(value)) + value


def _as_varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])
