"""Machines emulated by network namespaces, each with a name and an address of its own."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

_SUBNET = "10.77.0"
MAY_BE_POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None
"""Whether there is what machines are made of; a container may forbid them all the same."""


class Machines:
    """Network namespaces in which commands run; each has a device ``wire``, which a subclass or a caller makes.

    Args:
        directory: directory for the file with their names.
        name: part of the namespaces' names.
        count: number of machines.
    """

    def __init__(self, directory: Path, name: str, count: int = 2):
        self.names, self._hosts = [f"{name}-{node}" for node in range(count)], directory / "hosts"

    def make(self) -> None:
        """Makes the machines, which have no wire yet."""
        named = "".join(f"{_SUBNET}.{node + 1} node{node}\n" for node in range(len(self.names)))
        self._hosts.write_text(f"127.0.0.1 localhost\n{named}")
        for name in self.names:
            ip("netns", "add", name)

    def give_addresses(self) -> None:
        """Gives each machine its address, once it has its wire."""
        for node, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{_SUBNET}.{node + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")

    def wrap(self, node: int) -> list[str]:
        """Returns words before a command that run it on a machine, whose name is ``node0`` and so on."""
        inside = f'hostname node{node}; mount --bind {self._hosts} /etc/hosts; exec "$@"'
        return ["ip", "netns", "exec", self.names[node], "unshare", "-u", "-m", "sh", "-c", inside, "sh"]

    def remove(self) -> None:
        """Removes the machines."""
        for name in self.names:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", name)


class BridgedMachines(Machines):
    """Machines that a bridge joins, for the duration of a ``with`` block; their wires can be cut.

    Args:
        directory: directory for the file with their names.
        count: number of machines.
    """

    def __init__(self, directory: Path, count: int = 2):
        super().__init__(directory, f"sw{os.getpid() % 100_000}", count)

    def __enter__(self) -> Self:
        try:
            self.make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def make(self) -> None:
        """Makes the machines and the bridge."""
        super().make()
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")
        for node, name in enumerate(self.names):
            ip("link", "add", self._wire(node), "type", "veth", "peer", "wire", "netns", name)
            ip("link", "set", self._wire(node), "master", self._bridge, "up")
        self.give_addresses()

    def cut(self, node: int) -> None:
        """Cuts the wire of a machine."""
        ip("link", "set", self._wire(node), "down")

    def mend(self, node: int) -> None:
        """Mends the wire of a machine."""
        ip("link", "set", self._wire(node), "up")

    def remove(self) -> None:
        """Removes the machines and the bridge."""
        super().remove()
        with suppress(OSError, subprocess.CalledProcessError):
            ip("link", "delete", self._bridge)

    @property
    def _bridge(self) -> str:
        return self.names[0].removesuffix("-0")  # at most 15 bytes

    def _wire(self, node: int) -> str:
        return f"{self._bridge}w{node}"


def ip(*words: str) -> None:
    """Runs ``ip``; raises CalledProcessError where it fails."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
