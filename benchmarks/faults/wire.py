"""The wire between two machines: a process that can hold frames back."""

import ctypes
import fcntl
import heapq
import json
import os
import secrets
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .machines import Machines

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_LONGEST_FRAME, _POLL_S = 65_536, 0.005


class State(NamedTuple):
    """Behaviour of a wire.

    Attributes:
        delay_s: delay of each frame.
        cut: nodes that receive no frames.
        lost: share of frames that are lost.
    """

    delay_s: float = 0.0
    cut: tuple[int, ...] = ()
    lost: float = 0.0


class Network(Machines):
    """Two machines and a wire.

    Args:
        directory: directory for control files.
        name: name of the run, part of the namespaces' names.
    """

    def __init__(self, directory: Path, name: str):
        super().__init__(directory, f"faults-{name}")
        self._told = directory / "wire.json"
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Makes both machines and the wire."""
        self.say(State())
        super().make()
        words = [sys.executable, "-m", "benchmarks.faults.wire", str(self._told), *self.names]
        self._process = subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # both ends exist
        self.give_addresses()

    def say(self, state: State) -> None:
        """Changes the behaviour of the wire."""
        temporary = self._told.with_suffix(".new")
        temporary.write_text(json.dumps(state._asdict()))
        temporary.rename(self._told)

    def remove(self) -> None:
        """Removes the wire and both machines."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        super().remove()


def can_have_networks(directory: Path) -> bool:
    """Checks if machines can be emulated here."""
    network = Network(directory, f"probe-{secrets.token_hex(4)}")  # a campaign beside this one may be trying, too
    try:
        network.make()
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        network.remove()
    return True


def _end_in(name: str) -> int:
    """Opens the end of the wire in a namespace, where it is a device: to read and write this file is to be the wire."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, other = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{name}"))
    try:
        if libc.setns(other, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"wire", _TAP_WITHOUT_HEADER))
        libc.setns(own, 0)
        return end
    finally:
        os.close(own)
        os.close(other)


def _carry(told: Path, ends: list[int]) -> None:
    """Carries frames until it is killed."""
    import random

    state, read, waiting, count = State(), 0.0, list[Any](), 0
    while True:
        ready, _, _ = select.select(ends, [], [], _POLL_S if waiting else 0.05)
        now = time.monotonic()
        if now - read > 0.02:
            with suppress(OSError, ValueError):
                state, read = State(**json.loads(told.read_text())), now
        for end in ready:
            to = 1 - ends.index(end)
            with suppress(BlockingIOError):
                while frame := os.read(end, _LONGEST_FRAME):
                    if to not in state.cut and not (state.lost and random.random() < state.lost):
                        count += 1
                        heapq.heappush(waiting, (now + state.delay_s, count, to, frame))
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            with suppress(OSError):
                os.write(ends[to], frame)


if __name__ == "__main__":
    ends_of_wire = [_end_in(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    _carry(Path(sys.argv[1]), ends_of_wire)
