"""Collectives of a compiled program and the bytes that they exchange, parsed from its HLO text."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

RAGGED = "ragged-all-to-all"
ALL_TO_ALL = ("all-to-all", RAGGED)
"""Kinds of collective in which every device sends different data to every other."""
_KINDS = (*ALL_TO_ALL, "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_COLLECTIVE = re.compile(rf"= (?P<result>\(?[^=]*?\)?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)(?:[a-z]\w*)?)\[([\d,]*)\]")
_COUNTER = re.compile(r"\bu32\[\]")
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"^%?([\w.\-]+)")


class Loop(NamedTuple):
    """Loop around an instruction: its name scopes, and its trip count if the compiler knows it."""

    path: tuple[str, ...]
    num_trips: int | None


@dataclass(frozen=True)
class Collective:
    """Collective of a compiled program.

    Attributes:
        kind: HLO name, such as ``all-to-all``.
        num_bytes: input or output bytes per device, whichever is larger, including the part that a device keeps for
            itself: the convention of SYMI's D = s * N * G. For a ``ragged-all-to-all``, which moves only as many rows
            as its counts say, the smaller of the two: a device cannot send more than fits into its input, nor receive
            more than fits into its output.
        groups: groups of devices that exchange with each other, by position in the program's mesh; empty for one group
            of all devices.
        pairs: (source, target) pairs of a ``collective-permute``; empty for other kinds.
        path: name scopes from the outermost inward, from ``jax.named_scope`` and JAX's own.
        loops: enclosing loops, innermost first.
    """

    kind: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    path: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()


@dataclass
class _Computation:
    """Computation of an HLO module, and the instruction that calls it.

    Attributes:
        lines: instructions of the computation.
        caller: name of the computation that calls it.
        path: name scopes of the calling instruction.
        loop: the calling instruction, if it is a loop with this body.
    """

    lines: list[str] = field(default_factory=list)
    caller: str | None = None
    path: tuple[str, ...] = ()
    loop: Loop | None = None


def collective_bytes(hlo_text: str, num_devices: int) -> dict[str, int]:
    """Adds up the bytes for each kind of collective over all devices; an instruction in a loop counts once.

    Args:
        hlo_text: HLO text of a program, from ``compiled.as_text()``.
        num_devices: number of devices that run the program.

    >>> collective_bytes("a = f32[4,8]{1,0} all-to-all(b), replica_groups={{0,1}}", num_devices=2)
    {'all-to-all': 256}
    """
    total: Counter[str] = Counter()
    for collective in collectives(hlo_text, num_devices):
        total[collective.kind] += collective.num_bytes * num_devices
    return dict(total)


def collectives(hlo_text: str, num_devices: int) -> list[Collective]:
    """Lists a program's collectives, in text order.

    Args:
        hlo_text: HLO text of a program, from ``compiled.as_text()``.
        num_devices: number of devices that run the program.
    """
    computations = _computations(re.sub(r"/\*.*?\*/", "", hlo_text))
    instructions = []
    for computation in computations.values():
        for line in computation.lines:
            match = _COLLECTIVE.search(line)
            if match:
                instructions.append(_read(match, num_devices, computation, computations))
    return instructions


def _read(
    match: re.Match[str], num_devices: int, inside: _Computation, computations: Mapping[str, _Computation]
) -> Collective:
    kind, rest = match["kind"], match["rest"]
    sizes = _sizes(match["result"])
    if kind == RAGGED:
        results = _sizes(_COUNTER.sub("", match["result"]))  # a start lists operands before the result
        sizes = [min(results[-1], _operand_size(rest, inside.lines))]
    # An asynchronous start lists operands before results, followed by counters on TPU.
    elif match["start"] and kind != "all-reduce" and match["result"].startswith("("):
        sizes = _sizes(_COUNTER.sub("", match["result"]))
        sizes = sizes[len(sizes) // 2 :]
    groups, pairs = _groups(rest), _PAIRS.search(rest)
    num_bytes = sum(sizes)
    if kind == "reduce-scatter":
        num_bytes *= len(groups[0]) if groups else num_devices
    return Collective(
        kind,
        num_bytes,
        groups,
        tuple((a, b) for a, b in _tuples(pairs[1])) if pairs else (),
        _path(rest) or (_path_of_caller(inside, computations) if kind == RAGGED else ()),
        _loops(inside, computations),
    )


def _computations(text: str) -> Mapping[str, _Computation]:
    """Splits HLO text into computations by name; text without any header is one computation."""
    computations: dict[str, _Computation] = {}
    current = computations.setdefault("", _Computation())
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = computations.setdefault(header[1], _Computation())
            continue
        current.lines.append(line)
    for name, computation in computations.items():
        for line in computation.lines:
            branches = _BRANCHES.search(line)
            called = [*_CALLED.findall(line), *(re.findall(r"[\w.\-]+", branches[1]) if branches else ())]
            trips = _TRIPS.search(line)
            path = _path(line)
            loop = Loop(path, int(trips[1]) if trips else None) if " while(" in line else None
            for other in called:
                if other in computations:
                    callee = computations[other]
                    callee.caller, callee.path, callee.loop = name, path, loop
    return computations


def _path_of_caller(computation: _Computation, computations: Mapping[str, _Computation]) -> tuple[str, ...]:
    """Returns the name scopes of a computation's caller; XLA:GPU rewrites ``ragged-all-to-all`` and drops its name."""
    while not computation.path and computation.caller is not None:
        computation = computations[computation.caller]
    return computation.path


def _loops(computation: _Computation, computations: Mapping[str, _Computation]) -> tuple[Loop, ...]:
    loops = []
    while True:
        if computation.loop:
            loops.append(computation.loop)
        if computation.caller is None:
            return tuple(loops)
        computation = computations[computation.caller]


def _sizes(shapes: str) -> list[int]:
    """Returns the bytes of every array in an HLO shape."""
    return [
        max(int(bits or 8), 8) // 8 * math.prod(map(int, filter(None, dims.split(","))))
        for _, bits, dims in _ARRAY.findall(shapes)
    ]


def _operand_size(rest: str, lines: list[str]) -> int:
    """Returns the bytes of an instruction's first operand, from the line that defines it."""
    operand = _OPERAND.search(rest)
    assert operand is not None
    makes = re.compile(rf"^\s*(?:ROOT )?%?{re.escape(operand[1])} = (\S+)")
    return next(sum(_sizes(match[1])) for match in map(makes.search, lines) if match)


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    listed, iota = _GROUPS.search(rest), _IOTA_GROUPS.search(rest)
    if listed:
        return _tuples(listed[1])
    if not iota:
        return ()
    dims = [int(dim) for dim in iota[3].split(",")]
    positions = np.arange(math.prod(dims)).reshape(dims)
    if iota[4]:
        positions = positions.transpose([int(dim) for dim in iota[4].split(",")])
    return tuple(tuple(map(int, group)) for group in positions.reshape(int(iota[1]), int(iota[2])))


def _tuples(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses tuples of numbers such as ``{0,1},{2,3}``."""
    return tuple(tuple(map(int, inner.split(","))) for inner in re.findall(r"\{([\d,]+)\}", text))


def _path(line: str) -> tuple[str, ...]:
    name = _NAME.search(line)
    return tuple(filter(None, re.split(r"[/()]", name[1]))) if name else ()
