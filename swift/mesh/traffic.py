"""The collectives of a compiled program and the bytes that they exchange, read from its HLO text."""

import math
import re
from collections import Counter

_KINDS = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_INSTRUCTION = re.compile(
    rf"= (?P<result>\(?[^=]*?\)?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\((?P<rest>.*)$", re.MULTILINE
)
_ARRAY = re.compile(r"\b([a-z]+)(\d+)(?:[a-z]\w*)?\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")


def collective_bytes(hlo_text: str, num_devices: int) -> dict[str, int]:
    """Bytes of every kind of collective of a program, over all devices; instructions in a loop count once.

    An exchange counts what a device puts in or gets out, whichever is more, chunks that it keeps for itself included:
    the convention of SYMI's D = s * N * G.

    Args:
        hlo_text: ``compiled.as_text()``.
        num_devices: devices that run the program.

    >>> collective_bytes("a = f32[4,8]{1,0} all-to-all(b), replica_groups={{0,1}}", num_devices=2)
    {'all-to-all': 256}
    """
    total: Counter[str] = Counter()
    for match in _INSTRUCTION.finditer(re.sub(r"/\*.*?\*/", "", hlo_text)):
        kind, size = match["kind"], _array_bytes(match["result"])
        if match["start"] and match["result"].startswith("("):
            size //= 2  # an asynchronous start carries its operand beside its result
        if kind == "reduce-scatter":
            size *= _group_size(match["rest"], num_devices)
        total[kind] += size * num_devices
    return dict(total)


def _array_bytes(shapes: str) -> int:
    arrays = _ARRAY.findall(shapes)
    return sum(max(int(bits), 8) // 8 * math.prod(map(int, filter(None, dims.split(",")))) for _, bits, dims in arrays)


def _group_size(rest: str, num_devices: int) -> int:
    listed, iota = _GROUPS.search(rest), _IOTA_GROUPS.search(rest)
    if listed:
        return listed[1].count(",") + 1
    return int(iota[1]) if iota else num_devices
