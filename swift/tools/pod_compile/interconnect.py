"""Model of the time that collectives take on a pod's links: the bytes over the busiest link.

The chips of a TPU form a mesh whose long dims wrap around; a message travels one dim after the other, in the shorter
direction. A GPU has one link in each direction to the switch of its host, and one in each direction to other hosts. All
groups of a collective run concurrently. Kinds:

- ``all-to-all``: every device sends an equal share to every other; so it is taken to be for ``ragged-all-to-all``.
- ``all-gather``, ``reduce-scatter``: along a ring of the group, half of the bytes in each direction.
- ``all-reduce``: the two, one after the other.
- ``collective-permute``: its pairs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift.mesh.hlo_collectives import ALL_TO_ALL, Collective
from swift.tools.pod_compile.pods import Pod

_TPU_HOP_S, _GPU_MESSAGE_S = 1e-6, 5e-6
"""Latency of a step of a ring, or of a message, in seconds."""


class _Message(NamedTuple):
    source: int
    target: int
    num_bytes: float


@dataclass(frozen=True)
class Interconnect:
    """Links between the devices of a pod.

    Attributes:
        pod: the whole pod.
        coords: coordinates of every device of the program's mesh: (x, y, z) on a TPU, otherwise (host, number).
    """

    pod: Pod
    coords: Sequence[tuple[int, ...]]

    def seconds(self, one: Collective) -> float:
        """Time of one run of a collective, in all its groups at once."""
        messages, num_steps = list(self._messages(one)), self._num_steps(one)
        if not messages:
            return 0.0
        if self.pod.chip.platform == "tpu":
            return self._on_links(messages) + num_steps * _TPU_HOP_S
        return self._through_switches(messages) + num_steps * _GPU_MESSAGE_S

    def _messages(self, one: Collective) -> Iterator[_Message]:
        if one.kind == "collective-permute":
            yield from (_Message(a, b, one.num_bytes) for a, b in one.pairs)
            return
        for group in one.groups or (tuple(range(len(self.coords))),):
            size = len(group)
            if size == 1:
                continue
            if one.kind in ALL_TO_ALL:
                share = one.num_bytes / size
                yield from (_Message(a, b, share) for a in group for b in group if a != b)
                continue
            # Bytes over every edge of the ring, in both directions together.
            around = one.num_bytes * (size - 1) / size * (2 if one.kind == "all-reduce" else 1)
            ring = self._ring(group)
            for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
                yield from (_Message(a, b, around / 2), _Message(b, a, around / 2))

    def _num_steps(self, one: Collective) -> int:
        if one.kind in ("collective-permute", *ALL_TO_ALL):
            return 1
        size = max(map(len, one.groups), default=len(self.coords))
        return (2 if one.kind == "all-reduce" else 1) * size // 2

    def _ring(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Orders the devices of a group so that each is near the next: back and forth through the mesh."""

        def key(device: int) -> tuple[int, ...]:
            order: list[int] = []
            for place in reversed(self.coords[device]):
                order.append(-place if sum(map(abs, order)) % 2 else place)
            return tuple(order)

        return tuple(sorted(group, key=key))

    def _on_links(self, messages: Sequence[_Message]) -> float:
        load: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        for source, target, num_bytes in messages:
            for link in self._route(self.coords[source], self.coords[target]):
                load[link] += num_bytes  # type: ignore[assignment]
        return max(load.values()) / (self.pod.chip.link_bandwidth or float("inf"))

    def _route(self, here: tuple[int, ...], there: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yields the links of a route, each as (chip, dim, direction)."""
        place = list(here)
        for dim, size in enumerate(self.pod.shape):
            closes = size >= self.pod.chip.closes_from and size % self.pod.chip.closes_from == 0
            ahead = there[dim] - place[dim]
            if closes and abs(ahead) > size / 2:
                ahead -= size if ahead > 0 else -size
            step = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield tuple(place), dim, step
                place[dim] = (place[dim] + step) % size

    def _through_switches(self, messages: Sequence[_Message]) -> float:
        chip, load = self.pod.chip, Counter[tuple[int, str, bool]]()
        for source, target, num_bytes in messages:
            leaves = self.coords[source][0] != self.coords[target][0]
            load[source, "out", leaves] += num_bytes  # type: ignore[assignment]
            load[target, "in", leaves] += num_bytes  # type: ignore[assignment]
        speeds = {False: chip.link_bandwidth, True: chip.network_bandwidth}
        return max(num_bytes / (speeds[leaves] or float("inf")) for (_, _, leaves), num_bytes in load.items())
