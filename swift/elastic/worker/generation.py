"""Training in one generation as one process sees it, with the programs and states for it.

``run_generation`` runs ``swift.train.loop.TrainLoop``: ``GenerationWorkers`` are the loop's ``LiveWorkers``, and
``GenerationStates`` is its ``StateStore``.

``ProgramPreloader`` loads the programs of the next generation in advance if the members keep their devices. In any
other transition this is impossible, since XLA binds a loaded program to its devices: training waits until each member
has the new devices and has loaded its program. ``RetainedStates`` has the states that outlive a generation: on the
devices while it runs, and in shared memory for the next one.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import numpy as np

from swift.config.experiment import Experiment
from swift.data.loader import Loader
from swift.data.sources import DataError
from swift.elastic.membership.messages import (
    Done,
    Loaded,
    PhaseTimed,
    PreloadPrograms,
    Process,
    RecutFailed,
    StartGeneration,
    StateId,
)
from swift.elastic.state.slices import NeighbourCopies
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.transport.messages import FormGroup, Halt, Planned, Record, SnapshotKept, SnapshotMissed
from swift.elastic.worker.channel import CommandListener, ControlChannel
from swift.mesh.state_rows import fetch_shards, put_shards, shard_shapes
from swift.pipeline.reconfigure.compiled_steps import Steps, program_key
from swift.pipeline.reconfigure.configuration import Plan
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.reconfigure.recut import Cuts, UnknownAssignment, spec_with_assignment
from swift.pipeline.reconfigure.transfer import Share, checkpoint_rows, compiled_transfer, rebind_to_mesh, share_key
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment
from swift.tasks import one_thread
from swift.train.loop import LiveWorkers, StateStore, TrainLoop, is_due, window_length
from swift.train.records import plan_facts

NUM_SNAPSHOTS = 3
"""Number of snapshots in shared memory per process: one being stored, one being saved, one waiting."""


@dataclass(kw_only=True)
class GenerationRun:
    """One generation of a run, as one process sees it.

    Attributes:
        experiment: settings of the run.
        process: this process.
        command: command that formed the generation.
        steps: step functions on the mesh of the generation.
        fault_free: plan without failures for the same number of iterations, for comparison.
        train: batches of the training split.
        validation: batches of the validation split.
        channel: messages to the supervisor.
        commands: commands of the supervisor.
        abortable_for: maps the duration of a window, in seconds, to a context for calls that may wait for another
            process.
        window_s: longest duration of a window so far, in seconds.
    """

    experiment: Experiment
    process: Process
    command: FormGroup
    steps: Steps
    fault_free: Plan
    train: Loader
    validation: Loader
    channel: ControlChannel
    commands: CommandListener
    abortable_for: Callable[[float], AbstractContextManager[None]]
    window_s: float = 0.0

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self.command.form.number

    @property
    def halt(self) -> Halt | None:
        """Command to stop the run after an iteration, or None if this generation has not received one."""
        halt = self.commands.halt
        return halt if halt is not None and halt.number == self.number else None

    def abortable(self) -> AbstractContextManager[None]:
        """Returns a context for calls that may wait for another process, with a time limit from the windows so far."""
        return self.abortable_for(self.window_s)


@dataclass(kw_only=True)
class GenerationStates(StateStore):
    """The states of a generation, on the devices and in shared memory.

    Attributes:
        generation: generation that the states belong to.
        states: the newest two states on the devices, by stamp; two, since another process may not finish the last
            iteration.
        records: records by iteration, for iterations that may not be in the log yet.
        snapshots: store of states to be saved, and of restored states.
        copies: copies of another rank's slices; None if no copies are needed.
        copy_if_due: copies the newest state to shared memory if a copy is due, for the next incarnation.
        restored: stamp of the state that was loaded or resharded for the generation; None if there is none.
        saved: iteration of the newest snapshot that was stored in order to be saved; 0 if there is none.
    """

    generation: GenerationRun
    states: dict[StateId, TrainState]
    records: dict[int, dict[str, Any]]
    snapshots: SharedMemoryStore
    copies: NeighbourCopies | None
    copy_if_due: Callable[[], None]
    restored: StateId | None
    saved: int = 0

    def record_window(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:
        """Keeps this state and the previous one, and copies another rank's slices if a copy is due."""
        before = max(self.states)
        for old_step in [step for step in self.records if step < before.step]:
            del self.records[old_step]
        self.records.update({record["step"]: record for record in records})
        for old in self.states.keys() - {before}:
            del self.states[old]
        stamp = StateId(self.generation.number, done)
        self.states[stamp] = state  # after its records: another thread may store the state with them at any moment
        if self.copies is None:
            return
        for record in records:
            self.copies.count(record)
        if self.copies.is_due(done):
            self.copies.prepare()  # outside ``abortable``, since a compilation cannot be aborted
            with self.generation.abortable():
                self.copies.copy(stamp, state)

    def check(self, record: dict[str, Any]) -> None:
        """Accepts every record, since the supervisor checks the records of all processes."""

    def validated(self, done: int, loss: float) -> None:
        """Does nothing: no process stops, or keeps a checkpoint, because of a loss."""

    def is_due(self, done: int) -> bool:
        """Returns whether a checkpoint is due."""
        experiment = self.generation.experiment
        return is_due(done, experiment.checkpoint.every, experiment.num_steps)

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Stores a snapshot for the checkpoint service, on a set of workers that has every chunk exactly once."""
        generation = self.generation
        # The record has the loss before the update; a checkpoint needs the loss after it. A run that is about to stop
        # has no time to compile the program for the latter.
        loss = evaluate() if generation.halt is None else None
        spec, stamp = generation.steps.spec, StateId(generation.number, done)
        if generation.process.worker in [spec.live.workers[row] for row in checkpoint_rows(spec)]:
            try:
                self.snapshots.save(stamp, fetch_shards(replace(state, slots={})))
            except OSError as error:
                generation.channel.send(SnapshotMissed, stamp=stamp, reason=str(error))
            else:
                self.snapshots.retain_only(frozenset(sorted(self.snapshots.stamps())[-NUM_SNAPSHOTS:]))
                generation.channel.send(SnapshotKept, stamp=stamp, loss=loss)
        self.saved = done

    def end_window(self) -> None:
        """Copies the newest state if a copy is due, and removes the restored snapshot once two newer states exist."""
        self.copy_if_due()
        restored = self.restored
        if restored is not None and restored not in self.states and self.saved != restored.step:
            self.snapshots.retain_only(self.snapshots.stamps() - {restored})

    def fail_on_data_error(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:  # noqa: ARG002
        """Raises the error, which ``WorkerProcess`` reports to the supervisor."""
        try:
            raise error
        finally:
            del error  # its traceback would keep this frame alive, and with it all states of the generation


@dataclass(kw_only=True)
class GenerationWorkers(LiveWorkers):
    """The train loop's view of a generation: when windows begin and end, and when to stop.

    Attributes:
        generation: generation in which the loop runs.
        states: states of that generation.
    """

    generation: GenerationRun
    states: GenerationStates
    _is_first: bool = True
    _begun: float = field(default_factory=time.perf_counter)

    @property
    def steps(self) -> Steps:
        """Step functions on the mesh of the generation."""
        return self.generation.steps

    @property
    def period_ratio(self) -> float:
        """Planned duration of an iteration, relative to an iteration without failures."""
        return self.steps.plan.relative_period / self.generation.fault_free.relative_period

    def next_window_length(self, done: int) -> int:
        """Returns how many iterations the next window has, or 0 at the end of the run; see ``window_length``."""
        experiment = self.generation.experiment
        periods = (experiment.eval_every, experiment.checkpoint.every)
        if done >= experiment.num_steps:
            return 0
        return window_length(experiment.window, done, experiment.num_steps, periods)

    def should_stop(self, done: int) -> bool:
        """Returns whether this generation ends here: the run is done, is to stop, or a newer generation takes over."""
        generation = self.generation
        newest, halt = generation.commands.newest, generation.halt
        assert newest is not None
        if done >= generation.experiment.num_steps or (halt is not None and done >= halt.after):
            return True
        after = newest.form.after
        return newest.form.number > generation.number and (after is None or done >= after)

    def begin_window(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:  # noqa: ARG002
        """Tells the supervisor that a window begins."""
        self._begun = time.perf_counter()
        while self.generation.commands.hangs:  # an injected fault: the process stays here, but sends heartbeats
            time.sleep(1.0)
        self.generation.channel.entered = last
        self.generation.channel.send_heartbeat()
        return state, False

    @contextmanager
    def window(self, first: int, last: int) -> Iterator[None]:  # noqa: ARG002
        """Measures how long a window takes, which determines the time limit for later waits."""
        yield
        self.generation.window_s = max(self.generation.window_s, time.perf_counter() - self._begun)

    def abortable(self) -> AbstractContextManager[None]:
        """Returns a context for calls that may wait for another process."""
        return self.generation.abortable()

    def end_window(self, state: TrainState, done: int) -> None:  # noqa: ARG002
        """Tells the supervisor that a window is done and, for the first window, how long it took."""
        self.states.end_window()
        channel = self.generation.channel
        if self._is_first:
            seconds = round(time.perf_counter() - self._begun, 4)
            channel.send(PhaseTimed, number=self.generation.number, phase="first_step", seconds=seconds)
        self._is_first = False
        channel.finished = done
        channel.send_heartbeat()


def run_generation(generation: GenerationRun, start: StartGeneration, states: GenerationStates) -> None:
    """Trains in a generation until a newer one is to be formed, or until the run ends.

    Args:
        generation: generation that all members have formed.
        start: command that started the generation.
        states: states of the generation: exactly one, to resume from.
    """
    (stamp,) = states.states
    channel, number = generation.channel, generation.number
    # Two members report records, so that the death of one loses nothing; the supervisor takes each iteration once.
    members = start.go.holders or generation.command.form.members
    is_recorder = generation.process in [member.process for member in members[:2]]

    def record(record: dict[str, Any]) -> None:
        if is_recorder:
            channel.send(Record, record=record)

    workers = GenerationWorkers(generation=generation, states=states)
    loop = TrainLoop(generation.experiment, generation.train, generation.validation, workers, states, record)
    done = stamp.step
    channel.generation, channel.finished = number, done
    if is_recorder and not generation.steps.spec.is_single_worker:
        channel.send(Planned, number=number, facts=plan_facts(generation.steps))
    if start.written < done:
        unwritten = [record for step, record in sorted(states.records.items()) if start.written < step <= done]
        loop.finish(states.states[stamp], done, unwritten)
    elif done and states.is_due(done) and (start.go.holders or not start.is_restored):
        loop.save(states.states[stamp], done)  # once more: the processes that had its snapshot may have died
    done = loop.run(states.states[stamp], done)
    if generation.halt is not None and states.saved < done:
        loop.save(states.states[max(states.states)], done)
    if generation.halt is not None or done == generation.experiment.num_steps:
        channel.send(Done, number=number)


@dataclass(frozen=True, eq=False)
class GenerationPrograms:
    """The programs of a generation: to move blocks to its members, and then to train.

    Attributes:
        steps: step functions.
        before: step spec of the state that ``loaded`` converts; every member must have its part of that state.
        loaded: program that gives every member its blocks; None if it was not preloaded.
    """

    steps: Steps
    before: StepSpec | None = None
    loaded: Share | None = None

    def share(self, before: StepSpec, has_R: Sequence[bool], executables: ExecutableCache) -> Share:
        """Returns the program that gives every member its blocks: the preloaded one if it fits, else a compiled one."""
        is_loaded = self.before is not None and before.has_same_chunks(self.before) and all(has_R)
        if is_loaded and self.loaded is not None:
            return self.loaded
        return compiled_transfer(before, self.steps.spec, executables, has_R, self.steps.configuration.device_rows)


class ProgramPreloader:
    """Loads the next generation's programs while the main thread trains, on the same devices.

    Args:
        cuts: step specs and plans of the run.
        executables: cache of the run's programs.
        num_sequences: sequences per micro-batch, over all expert ranks.
        send: function that sends a message to the supervisor, see ``ControlChannel.send``.
    """

    def __init__(self, cuts: Cuts, executables: ExecutableCache, num_sequences: int, send: Callable[..., None]):
        self._cuts, self._executables, self._num_sequences = cuts, executables, num_sequences
        self._send = send
        self._thread = one_thread("load ahead")
        self._lock = threading.Lock()
        self._live: tuple[int, Steps, np.ndarray] | None = None
        self._loading: tuple[ChunkAssignment, Future[GenerationPrograms | None]] | None = None

    def begin(self, number: int, steps: Steps, devices_RN: np.ndarray) -> None:
        """Allows loading from now on, for the devices ``[R, N]`` of a generation that runs these steps."""
        with self._lock:
            self._live = number, steps, devices_RN

    def load(self, command: PreloadPrograms) -> None:
        """Starts loading programs, unless their generation has ended. Any thread may call this."""
        with self._lock:
            if self._live is not None and self._live[0] == command.number:
                self._loading = command.cut, self._thread.submit(self._load, command, *self._live[1:])

    def end(self, cut: ChunkAssignment) -> GenerationPrograms | None:
        """Ends loading for a generation, and waits for a program that is being loaded, since that uses the devices.

        Returns:
            The programs for the cut of the next generation, or None if they were not loaded.
        """
        with self._lock:
            self._live, loading, self._loading = None, self._loading, None
        if loading is None:
            return None
        loaded = loading[1].result()
        return loaded if loading[0] == cut else None

    def _load(self, command: PreloadPrograms, steps: Steps, devices_RN: np.ndarray) -> GenerationPrograms | None:
        loaded = None
        try:
            loaded = self._loaded(command.cut, steps, devices_RN)
        except UnknownAssignment as error:
            self._send(RecutFailed, number=command.number, reason=str(error))
            return None
        except Exception as error:  # preloading is optional: a lasting error recurs when the generation forms
            print(f"could not load programs ahead: {error}", file=sys.stderr, flush=True)
        self._send(Loaded, number=command.number)
        return loaded

    def _loaded(self, cut: ChunkAssignment, steps: Steps, devices_RN: np.ndarray) -> GenerationPrograms | None:
        """Loads programs; returns None if the cache lacks one, since nothing could end its compilation early."""
        failed, num_sequences = steps.configuration.failed, self._num_sequences
        recut = self._cuts.agreed(failed, cut)
        configuration = self._cuts.configure(recut, failed)
        ahead = Steps.of_processes(self._cuts.spec(recut), configuration, devices_RN, num_sequences, self._executables)
        spec, before = ahead.spec, spec_with_assignment(self._cuts.spec(None).at(ahead.spec.live), DEFAULT_ASSIGNMENT)
        shares = [True] * len(configuration.rows), configuration.device_rows
        own_key = program_key(configuration, spec.live.num_ranks, ahead.main, keep_state=True)
        keys = own_key, share_key(before, spec, *shares)
        if not all(key in self._executables for key in keys):
            return None
        ahead.compiled(ahead.main)
        if self._live is None:  # the generation has ended, and the main thread waits: load no more
            return None
        return GenerationPrograms(ahead, before, compiled_transfer(before, spec, self._executables, *shares))


class RetainedStates:
    """The newest states of a process: on the devices, and in a store that outlives generations and the process.

    Args:
        store: store in shared memory.
        memory_checkpoint_every: iterations between copies that a thread makes while training continues, for the next
            incarnation of this process; 0 to store states only at the end of a generation.

    Attributes:
        store: store in shared memory.
        on_devices: states on the devices, by stamp.
        records: records by iteration, stored with the states: the processes that should have reported them to the
            supervisor may have died.
    """

    def __init__(self, store: SharedMemoryStore, memory_checkpoint_every: int = 0):
        self.store, self._memory_checkpoint_every = store, memory_checkpoint_every
        self.on_devices: dict[StateId, TrainState] = {}
        self.records: dict[int, dict[str, Any]] = store.records()
        self._keeping = threading.Lock()
        self._own_stamps: set[StateId] = set()  # stored by this incarnation
        self._moved_from: StateId | None = None  # a stored state that others may still need for their blocks
        self._thread = one_thread("copies")
        self._copying: Future[None] | None = None
        self._copied: tuple[StateId, ...] = ()  # copies that were begun and may be needed, oldest first

    def begin(self, stamp: StateId, state: TrainState, moved: StateId | None) -> None:
        """Sets the state on the devices that a generation begins with, and removes all others from the store.

        Args:
            stamp: stamp of the state in the store, if it is there.
            state: the state on the devices.
            moved: new stamp of the state if the generation has a different cut, in which case the stored one stays
                until all workers have their blocks; None if the cut is the same.
        """
        self._moved_from = None if moved is None else stamp
        self.on_devices.clear()
        self.on_devices[moved or stamp] = state
        self._own_stamps &= {stamp}
        self.store.retain_only(frozenset({stamp}))
        self._copied = tuple(self.store.stamps())

    def placed(self, stamp: StateId, spec: StepSpec, *, is_there: bool) -> TrainState:
        """Puts this process's part of a state on its devices, for the mesh in ``spec``; zeros if it has no part.

        Args:
            stamp: stamp of the state.
            spec: spec of the state.
            is_there: whether this process has its part, see ``SharedMemoryStore.load``.
        """
        live, parts = spec.live, None
        if is_there and stamp in self.on_devices:  # the process has stayed connected: same devices, another mesh
            return rebind_to_mesh(self.on_devices[stamp], live, spec.specs)
        shapes = spec.abstract(with_slots=True)
        if is_there:
            num_devices = sum(device.process_index == jax.process_index() for device in live.mesh.devices.flat)
            like = shard_shapes(spec.specs, shapes, num_devices)
            parts = self.store.load(stamp, like, is_own=stamp in self._own_stamps)
        return put_shards(parts, live, spec.specs, shapes)

    def keep(self) -> None:
        """Stores the states that are on the devices, and removes older ones from the store.

        If there is not enough space, this process loses its part of these states but still has the states that were
        stored before; the membership takes this into account when it chooses the state to resume from.
        """
        self._settle()
        with self._keeping:
            for stamp in sorted(self.on_devices.keys() - self._own_stamps):
                self._save(stamp, self.on_devices[stamp])
            if self.on_devices and self.on_devices.keys() <= self._own_stamps:
                # Once an iteration is done (two states on the devices), every worker must have its blocks. Until then
                # others may need blocks of the state from which they were moved.
                retained = self.on_devices.keys() | ({self._moved_from} if len(self.on_devices) == 1 else set())
                self._own_stamps &= retained
                self.store.retain_only(frozenset(filter(None, retained)))

    def copy_if_due(self) -> None:
        """Starts copying the newest state if a copy is due at the end of a window, after waiting for the previous copy.

        A copy is due in the first window of a generation, and when a multiple of ``memory_checkpoint_every`` is
        reached. Two copies suffice to resume: a process that has finished a later window than that of its newest copy
        knows that all others have finished that window. There they waited for the previous copy, so all have that one.
        """
        if not self._memory_checkpoint_every:
            return
        before, newest = sorted(self.on_devices)
        if self._copying is not None and self._copying.done():
            self._settle()
        is_first = not self._copied or self._copied[-1].generation < newest.generation
        if is_first or newest.step // self._memory_checkpoint_every > before.step // self._memory_checkpoint_every:
            self._settle()
            self._copied = (*self._copied, newest)
            self._copying = self._thread.submit(self._save, newest, self.on_devices[newest])

    def _settle(self) -> None:
        """Waits for the copy in progress, and removes copies that are no longer needed."""
        if (copying := self._copying) is not None:  # read once: the thread that aborts may settle it at the same time
            copying.result()
            self._copying = None
            written = self.store.stamps()  # if there was no space for the newest, the two before it stay
            self._copied = tuple(stamp for stamp in self._copied if stamp in written)[-2:]
            self.store.retain_only(frozenset(self._copied))

    def _save(self, stamp: StateId, state: TrainState) -> None:
        """Stores a state with the records up to it; if there is no space, only prints a line."""
        records = [record for step, record in list(self.records.items()) if step <= stamp.step]
        try:
            self.store.save(stamp, fetch_shards(state), records)
            self._own_stamps.add(stamp)
        except OSError as error:
            print(f"the state after iteration {stamp.step} is not kept: {error}", file=sys.stderr, flush=True)
