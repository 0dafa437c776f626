"""The states of a worker process: on its devices during a generation, and in shared memory for the next one."""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from swift.elastic.membership.members import Stamp
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.mesh.process_shards import fetch_shards, place_shards, shard_shapes
from swift.pipeline.reconfigure.block_sharing import on_mesh
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState


class KeptStates:
    """The newest states of a process, which outlive its generations once they are kept.

    Args:
        store: store in shared memory.
        copy_every: iterations between copies that a thread makes while training continues, for an incarnation that
            follows this one; 0: states are kept at the end of a generation alone.

    Attributes:
        store: the same.
        on_devices: states on the devices by stamp.
        records: records by iteration of which states may be kept; the processes that ran them may have died unreported.
    """

    def __init__(self, store: SharedMemoryStore, copy_every: int = 0):
        self.store, self._copy_every = store, copy_every
        self.on_devices: dict[Stamp, TrainState] = {}
        self.records: dict[int, dict[str, Any]] = store.records()
        self._keeping = threading.Lock()
        self._own_stamps: set[Stamp] = set()  # kept by this incarnation
        self._moved_from: Stamp | None = None  # a kept state that others may still need for their blocks
        self._thread = ThreadPoolExecutor(1, "copies")
        self._copying: Future[None] | None = None
        self._copied: tuple[Stamp, ...] = ()  # copies that were begun, from the one on that all may need

    def begin(self, stamp: Stamp, state: TrainState, moved: Stamp | None) -> None:
        """Notes the state on the devices with which a generation begins, and removes all others from the store.

        Args:
            stamp: stamp with which it may be in the store.
            state: the state on the devices.
            moved: its stamp now that workers hold other blocks than those with which it was computed: the one in the
                store stays until they have them. None: they hold the same.
        """
        self._moved_from = None if moved is None else stamp
        self.on_devices.clear()
        self.on_devices[moved or stamp] = state
        self._own_stamps &= {stamp}
        self.store.keep_only(frozenset({stamp}))
        self._copied = tuple(self.store.stamps())

    def placed(self, stamp: Stamp, spec: StepSpec, *, is_there: bool) -> TrainState:
        """Puts this process's part of a state on its devices, those of the mesh of ``spec``; zeros if it has none.

        Args:
            stamp: stamp of the state.
            spec: spec of the state.
            is_there: whether this process has its part, see ``SharedMemoryStore.load``.
        """
        live, parts = spec.live, None
        if is_there and stamp in self.on_devices:  # they are those of the generation before
            return on_mesh(self.on_devices[stamp], live, spec.specs)
        shapes = spec.abstract(with_slots=True)
        if is_there:
            num_devices = sum(device.process_index == jax.process_index() for device in live.mesh.devices.flat)
            like = shard_shapes(spec.specs, shapes, num_devices)
            parts = self.store.load(stamp, like, is_own=stamp in self._own_stamps)
        return place_shards(parts, live, spec.specs, shapes)

    def keep(self) -> None:
        """Keeps the states on the devices, and removes older ones.

        Without room for them this process has lost its part of these states, and still has what it kept before; the
        membership chooses the state to resume from accordingly.
        """
        self._settle()
        with self._keeping:
            for stamp in sorted(self.on_devices.keys() - self._own_stamps):
                self._save(stamp, self.on_devices[stamp])
            if self.on_devices and self.on_devices.keys() <= self._own_stamps:
                # After an iteration it is known that all have their blocks; before, they may need those of this state.
                kept = self.on_devices.keys() | ({self._moved_from} if len(self.on_devices) == 1 else set())
                self._own_stamps &= kept
                self.store.keep_only(frozenset(filter(None, kept)))

    def copy_if_due(self) -> None:
        """Begins to copy the newest state if that is due, at the end of a window; waits for the copy before.

        It is due when a multiple of ``copy_every`` has been reached, and in the first window of a generation. A process
        that has ended a later window than that of a copy knows that all others have ended that one: all have the copy
        before, for which they waited there. So older ones are removed, and two are left.
        """
        if not self._copy_every:
            return
        before, newest = sorted(self.on_devices)
        if self._copying is not None and self._copying.done():
            self._settle()
        is_first = not self._copied or self._copied[-1].generation < newest.generation
        if is_first or newest.step // self._copy_every > before.step // self._copy_every:
            self._settle()
            self._copied = (*self._copied, newest)
            self._copying = self._thread.submit(self._save, newest, self.on_devices[newest])

    def _settle(self) -> None:
        """Waits for the copy in progress, and removes those that nobody needs any more."""
        if (copying := self._copying) is not None:  # read once: the thread that aborts may settle it at the same time
            copying.result()
            self._copying = None
            written = self.store.stamps()  # without room for the newest, the last two that are there stay
            self._copied = tuple(stamp for stamp in self._copied if stamp in written)[-2:]
            self.store.keep_only(frozenset(self._copied))

    def _save(self, stamp: Stamp, state: TrainState) -> None:
        """Puts a state into the store, with the records up to it."""
        records = [record for step, record in list(self.records.items()) if step <= stamp.step]
        try:
            self.store.save(stamp, fetch_shards(state), records)
            self._own_stamps.add(stamp)
        except OSError as error:
            print(f"the state after iteration {stamp.step} is not kept: {error}", file=sys.stderr, flush=True)
