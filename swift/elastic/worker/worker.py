"""A worker process: forms the generations that the supervisor requests, and trains in each of them.

Between two generations the process keeps its part of the state in shared memory. It keeps the last two iterations,
because another process may not have finished the last one. Devices and their contents are released with the generation,
unless its members stay connected to move blocks. Programs come from the run's executable cache.

``WorkerSpec`` has the settings of a process and its stores in shared memory. ``AbortableGroup`` ends waits for other
members when the supervisor wants another generation at once.
"""

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn, TextIO

import jax
from jax.extend.backend import clear_backends

from swift.config.experiment import Experiment
from swift.data.sources import DataError
from swift.deadlines import Deadlines
from swift.elastic.accelerators import AcceleratorGroup, MemberDevices, await_deaths
from swift.elastic.jax_group import JaxGroup, is_aborted
from swift.elastic.membership.messages import (
    Departed,
    Formed,
    FormGeneration,
    Member,
    Process,
    Ready,
    RecutFailed,
    StartGeneration,
    StateId,
    complete_workers,
    processes_of,
)
from swift.elastic.state.run_files import RunFiles
from swift.elastic.state.slices import ElasticSpecs, Handover, NeighbourCopies, SliceCopies, is_elastic
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.transport.messages import DataUnreadable, FormGroup
from swift.elastic.worker.channel import CommandListener, ControlChannel
from swift.elastic.worker.generation import (
    GenerationPrograms,
    GenerationRun,
    GenerationStates,
    ProgramPreloader,
    RetainedStates,
    run_generation,
)
from swift.errors import RunError
from swift.mesh.live import local_row
from swift.mesh.state_rows import put_shards, shard_shapes
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.reconfigure.configuration import Configuration
from swift.pipeline.reconfigure.executables import ExecutableCache, compiled_init, compiled_slots
from swift.pipeline.reconfigure.recut import Cuts, UnknownAssignment, spec_with_assignment
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.schedules.plans.normalize import ChunkAssignment
from swift.train.build import make_loader, make_plan_settings
from swift.train.saved_state import split_of

_EXIT_GONE, _EXIT_STUCK = 70, 71
"""Exit codes of a process whose supervisor is gone, and of a process that could not leave a generation."""
_CONNECT_S = 10
"""Time limit for all processes of a generation on CPUs to connect, in seconds."""
_CONNECT_FACTOR = 2
"""Time limit for all processes to get their accelerators, as a multiple of ``Deadlines.forming``. It is longer than the
supervisor's own limit: a process that gave up first would be blamed for another one whose device does not answer."""
_GRACE_S = 5.0
"""Seconds for which a worker that cannot continue waits before it asks for a new generation. Within this time, the
supervisor usually detects the death of a peer and forms a generation because of it."""
_STUCK_S, _STUCK_FACTOR = 5.0, 3.0
"""Time limit for an aborted program to end: so many seconds, or so many times the longest window so far if longer."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Settings of a worker process, and the stores and caches that they determine.

    Attributes:
        experiment: settings of the run.
        process: identity of this process in the run.
        by_rank: whether each expert rank is a process of its own, rather than each worker.
        scratch: files that are shared with the other processes.
        memory_checkpoint_every: iterations between copies of the state for the next incarnation; 0 for no copies.
        devices: accelerators of the process; None if it computes on the CPU.
        forming_s: the run's ``Deadlines.forming``, in seconds.
    """

    experiment: Experiment
    process: Process
    by_rank: bool
    scratch: RunFiles
    memory_checkpoint_every: int = 0
    devices: MemberDevices | None = None
    forming_s: float = Deadlines.forming
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def gone(self) -> NoReturn:
        """Removes the shared files and ends the process, because the supervisor is gone."""
        with self._ending:  # a second thread that detects it must not exit while the first is still removing
            self.scratch.remove()
            os._exit(_EXIT_GONE)

    def group(self, address: str, index: int, num_processes: int) -> JaxGroup:
        """Returns a generation's group for process ``index``, not yet joined; see ``JaxGroup``."""
        if self.devices is None:
            return JaxGroup(address, index, num_processes, _CONNECT_S)
        timeout_s = math.ceil(_CONNECT_FACTOR * self.forming_s)
        return AcceleratorGroup(self.devices, address, index, num_processes, timeout_s)

    def programs(self) -> ExecutableCache:
        """Returns the run's cache of compiled programs."""
        if self.devices is None:
            return ExecutableCache(self.scratch.programs)
        # XLA divides the autotuning of GPU kernels among the processes of a group, so they have to compile at the same
        # time: no process may wait for another process's program.
        return ExecutableCache(self.scratch.programs, patience_s=0)

    def step_specs(self) -> ElasticSpecs:
        """Returns the step specs of the run, with the attention kernel for this process's devices."""
        return ElasticSpecs(self.experiment, None if self.devices is None else self.devices.platform)

    def states(self) -> SharedMemoryStore:
        """Returns the store for whole states between two generations."""
        return SharedMemoryStore(self.scratch.states, self.process)

    def snapshots(self) -> SharedMemoryStore:
        """Returns the store for states without slots, which are to be saved or were restored."""
        return SharedMemoryStore(self.scratch.snapshots, self.process)

    def copies(self) -> SliceCopies:
        """Returns the store for copies of other ranks' slices."""
        return SliceCopies(self.scratch.copies)

    @property
    def is_elastic(self) -> bool:
        """Whether any subset of the ranks can continue the run, see ``swift.elastic.membership.state_machine``."""
        return is_elastic(self.experiment, by_rank=self.by_rank)

    def await_deaths(self, error: Exception) -> None:
        """Waits before an error ends the process, if its cause may be the death of a peer; see ``accelerators``."""
        if self.devices is not None:
            await_deaths(error)


class AbortableGroup:
    """Ends the main thread's waits for other members: aborts their group or, as a last resort, ends the process.

    Args:
        keep: function that stores the states of this process, called before the process ends.

    Attributes:
        number: generation that the main thread forms or runs.
        group: group of that generation, or the old group until the main thread has left it; None if there is none.
    """

    def __init__(self, keep: Callable[[], None]):
        self._keep = keep
        self._limit_s: float | None = None
        self.number = 0
        self.group: JaxGroup | None = None

    @contextmanager
    def abortable(self, limit_s: float) -> Iterator[None]:
        """Marks calls that nothing can interrupt: the process ends if one lasts ``limit_s`` seconds after an abort."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None

    def aborter(self, number: int) -> Callable[[], None]:
        """Returns a function that aborts the collectives of all generations before ``number``.

        ``CommandListener`` calls it repeatedly, from another thread, until the main thread has taken the new command.
        """
        start_time = time.monotonic()

        def abort() -> None:
            # Read the group on every call, as the main thread may have just connected. Read it before the number: the
            # main thread sets the number before it connects, so the group of the new generation is never aborted.
            group, limit_s = self.group, self._limit_s
            if self.number >= number:
                return
            if group is not None:
                group.abort()
            if limit_s is not None and time.monotonic() - start_time > limit_s:
                # A connection that broke during a send may never be reported (see JaxGroup.abort), and nothing can
                # interrupt the creation of a backend. The next incarnation of this process finds the stored state.
                print(f"cannot be aborted for {limit_s:g} s: this process ends", file=sys.stderr, flush=True)
                self._keep()
                os._exit(_EXIT_STUCK)

        return abort


class WorkerProcess:
    """A worker process, which joins one generation after another as the supervisor commands.

    Args:
        worker_spec: settings and stores of the process.
        commands: stream of the supervisor's commands, one per line.
    """

    def __init__(self, worker_spec: WorkerSpec, commands: TextIO):
        self._worker_spec, self._experiment = worker_spec, worker_spec.experiment
        scratch = worker_spec.scratch
        self._data = tuple(make_loader(self._experiment, split, scratch.corpus) for split in ("train", "validation"))
        self._data[0].restore(scratch.data())
        self._executables = worker_spec.programs()
        self._kept = RetainedStates(worker_spec.states(), worker_spec.memory_checkpoint_every)
        # Specs are created on a backend of this process alone, which is cleared below because each generation has its
        # own: no array of this backend may be kept.
        self._specs = worker_spec.step_specs()
        spec = self._specs.on(self._experiment.topology.num_expert_ranks)
        num_sequences = self._experiment.sequences_per_microbatch
        self._cuts = Cuts(spec, make_plan_settings(self._experiment, spec), num_sequences, self._executables)
        self._handover: Handover | None = None
        if worker_spec.is_elastic:
            processes = processes_of(self._experiment.topology, by_rank=True)
            self._handover = Handover(scratch.handed_over, scratch.snapshots, processes)
            self._num_classes = split_of(spec).num_classes
            self._specs.on(max(1, len(processes) - 1))  # warms the cache for the loss of one rank, the likeliest case
        clear_backends()
        gc.collect()
        gc.freeze()  # objects that exist now live forever: the collection at the end of a generation can skip them
        self._num_devices = 1 if worker_spec.by_rank else self._experiment.topology.num_expert_ranks
        self._waits = AbortableGroup(self._kept.keep)
        self._members: tuple[Member, ...] = ()  # of the last generation
        self._neighbour_copies: NeighbourCopies | None = None
        self._channel = ControlChannel(worker_spec.gone)
        self._ahead = ProgramPreloader(self._cuts, self._executables, num_sequences, self._channel.send)
        self._commands = CommandListener(commands, self._waits.aborter, self._ahead.load, worker_spec.gone)

    def run(self, done: int) -> None:
        """Forms and runs generations until the supervisor ends the process.

        Args:
            done: number of iterations that the run had completed when this process began.
        """
        # Skip data before reporting ready, or a whole generation would wait for that. A thread sends heartbeats by now.
        self._data[0].skip_to(done)
        self._channel.send(Ready, number=0)
        number, grace_s, is_broken = 0, None, False
        while True:
            command = self._commands.wait_to_form(number, grace_s)
            grace_s = None
            if command is None:
                self._channel.send(Ready, number=number)
                continue
            number = command.form.number
            if is_broken and command.form.stays_connected:  # its connections are broken: it cannot stay connected
                self._channel.send(Ready, number=number)
                continue
            is_broken = False
            try:
                self._join_generation(command)
            except DataError as error:
                # The supervisor forms one more generation, which saves the common state and runs no iteration; see
                # ``WorkerResults``.
                self._channel.send(DataUnreadable, number=number, reason=str(error))
            except UnknownAssignment as error:
                self._channel.send(RecutFailed, number=number, reason=str(error))
            except Exception as error:
                if not is_aborted(error):
                    self._worker_spec.await_deaths(error)
                    raise
                print(f"generation {number} ends: {error}", file=sys.stderr)
                grace_s, is_broken = _GRACE_S, True

    def _join_generation(self, command: FormGroup) -> None:
        """Leaves the last generation, forms this one and runs it; returns early if a newer one is to be formed."""
        number, members = command.form.number, command.form.members
        self._waits.number = number
        self._channel.generation = self._channel.entered = self._channel.finished = 0
        with self._channel.timed(number, "leave"):
            programs = self._leave(command.form)
            self._hand_over(members)
            present = {member.process.worker for member in members}
            failed = frozenset(self._experiment.topology.workers) - present
            recut = self._cuts.agreed(failed, command.form.cut)
            spec, configuration = self._cuts.spec(recut), self._cuts.configure(recut, failed)
            if self._worker_spec.is_elastic:
                spec = self._specs.on(len(members))
            if self._waits.group is None:
                clear_backends()  # drops any backend that planning has created: the new group creates its own
        self._channel.send(Departed, number=number)
        if not self._commands.wait_to_enter(number):
            return
        if programs is None:
            programs = GenerationPrograms(self._form_group(command, configuration, spec))
        stamps, known_slices = self._kept.store.stamps(), frozenset[tuple[Process, StateId]]()
        if self._handover is not None:
            known_slices = self._handover.find_slices(self._worker_spec.process, stamps, self._num_classes)
        self._channel.send(Formed, number=number, states=stamps, known_slices=known_slices)
        start = self._commands.wait_to_start(number)
        if start is not None:
            with self._channel.timed(number, "state"):
                self._restore_state(programs, start, command.form.cut)
            steps = programs.steps
            del programs  # frees the program that copied blocks between members
            self._run_generation(command, steps, start)

    def _run_generation(self, command: FormGroup, steps: Steps, start: StartGeneration) -> None:
        plans, (train, validation) = self._cuts.configure(None, frozenset()).plans, self._data
        generation = GenerationRun(
            experiment=self._experiment,
            process=self._worker_spec.process,
            command=command,
            steps=steps,
            fault_free=plans[steps.plan.schedule.problem.num_iterations],
            train=train,
            validation=validation,
            channel=self._channel,
            commands=self._commands,
            abortable_for=lambda window_s: self._waits.abortable(max(_STUCK_S, _STUCK_FACTOR * window_s)),
        )
        states = GenerationStates(
            generation=generation,
            states=self._kept.on_devices,
            records=self._kept.records,
            snapshots=self._worker_spec.snapshots(),
            copies=self._neighbour_copies,
            copy_if_due=self._kept.copy_if_due,
            restored=max(self._kept.on_devices) if start.is_restored else None,
        )
        assert self._waits.group is not None, "it has formed the generation"
        self._ahead.begin(command.form.number, steps, self._waits.group.grid(steps.spec.live.num_ranks))
        run_generation(generation, start, states)

    def _leave(self, form: FormGeneration) -> GenerationPrograms | None:
        """Stores the states of the last generation, and leaves it and its devices unless its members stay connected.

        Returns:
            The preloaded programs of the next generation if its members stay connected and the programs were loaded in
            time, otherwise None.
        """
        if self._neighbour_copies is not None:
            self._neighbour_copies.close()
        self._neighbour_copies = None
        self._kept.keep()
        loaded = self._ahead.end(form.cut)
        if form.stays_connected:
            return loaded
        self._kept.on_devices.clear()
        if self._waits.group is not None:
            self._waits.group.leave()
        self._waits.group = None
        return None

    def _hand_over(self, members: tuple[Member, ...]) -> None:
        """Shares the slices that other processes may need, if the members have changed since the last generation."""
        if self._handover is not None and members != self._members:
            lost = {process for process, _ in set(self._members) - set(members)}
            lost |= set(self._handover.processes) - {process for process, _ in members}
            copies = self._worker_spec.copies()
            try:
                self._handover.hand_over(self._worker_spec.process, self._kept.store, copies, lost)
            except OSError as error:  # no space left: the others resume from the slices that do exist
                print(f"not all states are handed over: {error}", file=sys.stderr, flush=True)
        self._members = members

    def _form_group(self, command: FormGroup, configuration: Configuration, spec: StepSpec) -> Steps:
        """Connects to the other members, unless still connected, and loads or compiles the step program."""
        number, topology = command.form.number, spec.live.topology
        processes, process = [member.process for member in command.form.members], self._worker_spec.process
        with self._channel.timed(number, "connect"):
            if self._waits.group is None:
                row = [row.worker for row in configuration.rows].index(process.worker)
                per_worker = topology.num_expert_ranks // self._num_devices
                rank = processes.index(process) if self._worker_spec.is_elastic else process.rank
                index = configuration.device_rows[row] * per_worker + rank
                with self._waits.abortable(_CONNECT_S + _STUCK_S):
                    num_processes = len(configuration.rows) * per_worker
                    self._waits.group = self._worker_spec.group(command.address, index, num_processes)
                    self._waits.group.join()
        with self._channel.timed(number, "load_program"):
            devices_RN = self._waits.group.grid(topology.num_expert_ranks)
            num_sequences = self._experiment.sequences_per_microbatch
            steps = Steps.of_processes(spec, configuration, devices_RN, num_sequences, self._executables)
            steps.compiled(steps.main)
        config = self._experiment.checkpoint
        if self._worker_spec.is_elastic and config.snapshot_every and len(processes) > 1:
            copies = self._worker_spec.copies()
            self._neighbour_copies = NeighbourCopies(steps.spec, self._executables, copies, process, processes, config)
        return steps

    def _restore_state(self, programs: GenerationPrograms, start: StartGeneration, cut: ChunkAssignment) -> None:
        """Puts the state to resume from on the devices, and removes all other states from the store.

        The state is initialized, loaded from the snapshots, or assembled from the members. If the generation's cut
        differs from that of the state, the stored state stays until all workers have their blocks.
        """
        spec, go = programs.steps.spec, start.go
        live, stamp = spec.live, go.stamp or StateId(go.number, 0)
        moved = StateId(go.number, stamp.step) if go.cut != cut else None
        if go.stamp is None:
            state = compiled_init(spec, self._executables, self._experiment.seed)()
        elif start.is_restored:
            specs, shapes = replace(spec.specs, slots={}), spec.abstract()
            snapshots = self._worker_spec.snapshots()
            parts = snapshots.load(stamp, shard_shapes(specs, shapes, self._num_devices))
            state = compiled_slots(spec, self._executables)(put_shards(parts, live, specs, shapes))
            snapshots.retain_only(frozenset({stamp}))
        else:
            before = spec if go.cut == cut else spec_with_assignment(self._cuts.spec(None).at(live), go.cut)
            holders = {member.process for member in go.holders}
            state = self._state_of_members(before, programs, stamp, holders)
        self._kept.begin(stamp, jax.block_until_ready(state), moved)
        if self._handover is not None:
            self._handover.withdraw(self._worker_spec.process, stamps=frozenset({stamp}))

    def _state_of_members(
        self, before: StepSpec, programs: GenerationPrograms, stamp: StateId, holders: set[Process]
    ) -> TrainState:
        """Assembles this process's state: its own shards from shared memory, missing blocks from peers over the mesh.

        Args:
            before: spec of the state as the holders have it.
            programs: programs of the generation, on the same mesh; the returned state has their spec.
            stamp: stamp of the state.
            holders: processes that have their part of the state.
        """
        spec, live = programs.steps.spec, before.live
        state = self._kept.placed(stamp, before, is_there=self._worker_spec.process in holders)
        complete = complete_workers(processes_of(live.topology, by_rank=self._worker_spec.by_rank), holders)
        has_R = [worker in complete for worker in live.workers]
        if not all(has_R) or not before.has_same_chunks(spec):
            share = programs.share(before, has_R, self._executables)
            with self._waits.abortable(_STUCK_S):
                state, has_arrived = jax.block_until_ready(share(state))
            if not local_row(has_arrived):
                raise RunError(f"the state of a peer has not arrived as it was sent, after iteration {stamp.step}")
        return state
