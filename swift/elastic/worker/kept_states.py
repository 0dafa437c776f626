"""The states of a worker process: on its devices during a generation, and in shared memory for the next one."""

import sys
import threading
from typing import Any

from swift.elastic.membership import Stamp
from swift.elastic.state import SharedMemoryStore
from swift.mesh import fetch_shards
from swift.pipeline import TrainState


class KeptStates:
    """The newest states of a process, which outlive its generations once they are kept.

    Args:
        store: store in shared memory.

    Attributes:
        store: the same.
        on_devices: states on the devices by stamp.
        records: records by iteration of which states may be kept; the processes that ran them may have died unreported.
    """

    def __init__(self, store: SharedMemoryStore):
        self.store = store
        self.on_devices: dict[Stamp, TrainState] = {}
        self.records: dict[int, dict[str, Any]] = store.records()
        self._keeping = threading.Lock()
        self._own_stamps: set[Stamp] = set()  # kept by this incarnation
        self._moved_from: Stamp | None = None  # a kept state that others may still need for their blocks

    def begin(self, stamp: Stamp, state: TrainState, moved: Stamp | None) -> None:
        """Notes the state on the devices with which a generation begins, and removes all others from the store.

        Args:
            stamp: stamp with which it may be in the store.
            state: the state on the devices.
            moved: its stamp now that workers hold other blocks than those with which it was computed: the one in the
                store stays until they have them. None: they hold the same.
        """
        self._moved_from = None if moved is None else stamp
        self.on_devices[moved or stamp] = state
        self._own_stamps &= {stamp}
        self.store.keep_only(frozenset({stamp}))

    def load(self, stamp: Stamp, like: Any) -> Any:
        """Loads this process's part of a state from the store; see ``SharedMemoryStore.load``."""
        return self.store.load(stamp, like, is_own=stamp in self._own_stamps)

    def keep(self) -> None:
        """Keeps the states on the devices, and removes older ones.

        Without room for them this process has lost its part of these states, and still has what it kept before; the
        membership chooses the state to resume from accordingly.
        """
        with self._keeping:
            for stamp in sorted(self.on_devices.keys() - self._own_stamps):
                records = [record for step, record in list(self.records.items()) if step <= stamp.step]
                try:
                    self.store.save(stamp, fetch_shards(self.on_devices[stamp]), records)
                    self._own_stamps.add(stamp)
                except OSError as error:
                    print(f"the state after iteration {stamp.step} is not kept: {error}", file=sys.stderr, flush=True)
            if self.on_devices and self.on_devices.keys() <= self._own_stamps:
                # After an iteration it is known that all have their blocks; before, they may need those of this state.
                kept = self.on_devices.keys() | ({self._moved_from} if len(self.on_devices) == 1 else set())
                self._own_stamps &= kept
                self.store.keep_only(frozenset(filter(None, kept)))
