"""A process of a run: forms the generations that the supervisor orders, and runs the iterations of each.

Between two generations its part of the state is in shared memory: after the last two iterations, since a peer may not
have finished the last. Everything on devices ends with the generation; programs come from the run's store.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from swift.data import DataError, check_same_data
from swift.elastic.elastic_programs import ElasticPrograms
from swift.elastic.jax_group import Link, is_called_off
from swift.elastic.membership import (
    Departed,
    Formed,
    Member,
    Process,
    Ready,
    Stamp,
    Took,
    processes_of,
    whole_workers,
)
from swift.elastic.state import Handover, NeighbourCopies
from swift.elastic.transport import DataUnreadable, FormGroup, StartGeneration
from swift.elastic.worker.control_channel import CommandListener, ControlChannel
from swift.elastic.worker.loop import GenerationRun, GenerationStates, run_generation
from swift.elastic.worker.worker_spec import STUCK, WorkerSpec
from swift.errors import RunError
from swift.mesh import AXES, LiveMesh, fetch_parts, own_row, part_shapes, place_parts
from swift.pipeline import Configuration, Configurator, Steps, StepSpec, TrainState
from swift.pipeline.reconfigure import ExecutableCache, compiled_init, compiled_share, compiled_slots
from swift.train.checkpoints import split_of

_GRACE_S = 5.0
"""How long a worker that cannot continue waits for a new generation before it asks for one: deaths are found first."""
_STUCK_S, _STUCK_FACTOR = 5.0, 3.0
"""How long a program may take to see that it was aborted: so long, or so many times as long as it usually takes."""
_LINK_S = 10


class WorkerProcess:
    """A process that is a member of one generation after the other.

    Args:
        part: what it is to run.
        commands: of the supervisor, a line each.
    """

    def __init__(self, part: WorkerSpec, commands: TextIO):
        self._part, self._experiment = part, part.experiment
        corpus = part.scratch.corpus
        self._data = part.experiment.loader("train", corpus), part.experiment.loader("validation", corpus)
        check_same_data(part.scratch.data(), self._data[0].state())
        self._store, self._kept = ExecutableCache(part.scratch.programs), part.states()
        # No array of this backend is kept: a generation has its own.
        self._programs = ElasticPrograms(part.experiment)
        spec = self._programs.on(part.experiment.topology.num_expert_ranks)
        self._configurator = Configurator(self._experiment.plan_settings(spec), self._store)
        self._handover: Handover | None = None
        if part.is_elastic:
            everybody = processes_of(part.experiment.topology, by_rank=True)
            self._handover = Handover(part.scratch.handed, part.scratch.snapshots, everybody)
            self._num_classes = split_of(spec).num_classes
            self._programs.on(max(1, len(everybody) - 1))  # what is most likely to be needed in a hurry
        clear_backends()
        gc.collect()
        gc.freeze()  # what is here now stays: who leaves a generation need not look through it
        self._num_devices = 1 if part.by_rank else self._experiment.topology.num_expert_ranks
        self._link: Link | None = None
        self._members: tuple[Member, ...] = ()  # of the last generation
        self._buddy: NeighbourCopies | None = None
        self._states: dict[Stamp, TrainState] = {}  # on the devices
        self._saving = threading.Lock()
        self._own: set[Stamp] = set()  # kept by this life of the process
        # Of the iterations whose states may be held; who ran them may have died before it could tell them.
        self._records: dict[int, dict[str, Any]] = self._kept.records()
        self._limit_s: float | None = None  # for what the main thread is in, where it cannot be reached
        self._channel = ControlChannel(part.gone)
        self._orders = CommandListener(commands, self._leaving, part.gone)

    def run(self) -> None:
        """Forms and runs generations until the supervisor ends the process."""
        self._channel.say(Ready, number=0)
        number, grace = 0, None
        while True:
            order = self._orders.wait_for_order(number, grace)
            grace = None
            if order is None:
                self._channel.say(Ready, number=number)
                continue
            number = order.form.number
            try:
                self._follow(order)
            except DataError as error:
                # The next generation keeps the state that all have, and runs no iteration: see ``Supervisor``.
                self._channel.say(DataUnreadable, number=number, why=str(error))
            except Exception as error:
                if not is_called_off(error):
                    raise
                print(f"generation {number} ends: {error}", file=sys.stderr)
                grace = _GRACE_S

    def _follow(self, order: FormGroup) -> None:
        """Forms a generation and runs it, if it is not called off before."""
        number = order.form.number
        self._channel.generation = self._channel.entered = self._channel.finished = 0
        with self._timed(number, "leave"):
            self._leave()
            self._hand_over(order.form.members)
            present = {member.process.worker for member in order.form.members}
            configuration = self._configurator.configure(frozenset(self._experiment.topology.workers) - present)
            spec = self._spec_for(len(order.form.members))
        self._channel.say(Departed, number=number)
        if not self._orders.may_enter(number):
            return
        steps = self._form(order, configuration, spec)
        held = self._kept.stamps()
        handover = self._handover
        found = handover.found(self._part.process, held, self._num_classes) if handover else frozenset()
        self._channel.say(Formed, number=number, held=held, found=found)
        leave = self._orders.wait_for_go(number)
        if leave is not None:
            with self._timed(number, "state"):
                self._take_up(steps, leave)
            self._run_generation(order, steps, leave)

    def _run_generation(self, order: FormGroup, steps: Steps, start: StartGeneration) -> None:
        plans, (train, validation) = self._configurator.configure(frozenset()).plans, self._data
        generation = GenerationRun(
            experiment=self._experiment,
            process=self._part.process,
            order=order,
            steps=steps,
            fault_free_period=plans[steps.plan.schedule.problem.num_iterations].period,
            train=train,
            validation=validation,
            channel=self._channel,
            orders=self._orders,
            watched=lambda window_s: self._watched(max(_STUCK_S, _STUCK_FACTOR * window_s)),
        )
        states = GenerationStates(
            generation=generation,
            states=self._states,
            records=self._records,
            snapshots=self._part.snapshots(),
            copies=self._buddy,
            keep=self._keep_states if self._part.keeps_all else lambda: None,
            restored=max(self._states) if start.is_restored else None,
        )
        run_generation(generation, start, states)

    def _leave(self) -> None:
        """Out of the last generation; what it had on devices is forgotten."""
        if self._buddy is not None:
            self._buddy.close()
        self._buddy = None
        self._keep_states()
        self._states.clear()
        if self._link is not None:
            self._link.leave()
        self._link = None

    def _keep_states(self) -> None:
        """Keeps what is on the devices, and forgets what is older; without room for it, this process has lost it.

        Then it has what it has kept before, and the supervisor chooses the state to resume from accordingly.
        """
        with self._saving:
            for stamp in sorted(self._states.keys() - self._own):
                records = [record for step, record in list(self._records.items()) if step <= stamp.step]
                try:
                    self._kept.save(stamp, fetch_parts(self._states[stamp]), records)
                    self._own.add(stamp)
                except OSError as error:
                    print(f"the state after iteration {stamp.step} is not kept: {error}", file=sys.stderr, flush=True)
            if self._states and self._states.keys() <= self._own:
                self._own &= self._states.keys()
                self._kept.forget(but=frozenset(self._states))

    def _hand_over(self, members: tuple[Member, ...]) -> None:
        """What others may need of this process where they are not those of the last generation."""
        if self._handover is not None and members != self._members:
            lost = {process for process, _ in set(self._members) - set(members)}
            lost |= {process for process in self._handover.processes if process not in {one for one, _ in members}}
            try:
                self._handover.hand_over(self._part.process, self._kept, self._part.copies(), lost)
            except OSError as error:  # the others use what there is
                print(f"not all states are handed over: {error}", file=sys.stderr, flush=True)
        self._members = members

    def _spec_for(self, num_members: int) -> StepSpec:
        """On the ranks of a generation; what it takes to find it out leaves nothing on devices."""
        num_ranks = num_members if self._part.is_elastic else self._experiment.topology.num_expert_ranks
        spec = self._programs.on(num_ranks)
        clear_backends()
        return spec

    def _form(self, order: FormGroup, configuration: Configuration, spec: StepSpec) -> Steps:
        """Into the generation, up to where it can run."""
        number, places, topology = order.form.number, configuration.places, spec.live.topology
        with self._timed(number, "link"):
            row = [place.worker for place in places].index(self._part.process.worker)
            per_worker = topology.num_expert_ranks // self._num_devices
            rank = self._part.process.rank
            if self._part.is_elastic:
                rank = [member.process for member in order.form.members].index(self._part.process)
            with self._watched(_LINK_S + _STUCK_S):
                self._link = Link(order.address, row * per_worker + rank, len(places) * per_worker, _LINK_S)
                self._link.join()
        with self._timed(number, "program"):
            live = LiveMesh(topology, places, Mesh(self._link.grid(topology.num_expert_ranks), AXES))
            num_sequences = self._experiment.sequences_per_microbatch
            steps = Steps(spec.at(live), configuration, num_sequences, self._store, keep_state=True)
            steps.compiled(steps.main)
        self._buddy = self._buddy_in(steps.spec, [process for process, _ in order.form.members])
        return steps

    def _buddy_in(self, spec: StepSpec, processes: list[Process]) -> NeighbourCopies | None:
        config = self._experiment.checkpoint
        if not (self._part.is_elastic and config.snapshot_every and len(processes) > 1):
            return None
        return NeighbourCopies(spec, self._store, self._part.copies(), self._part.process, processes, config)

    def _take_up(self, steps: Steps, leave: StartGeneration) -> None:
        """Puts the state to resume from on the devices, and no other."""
        spec, go = steps.spec, leave.go
        live, stamp = spec.live, go.stamp or Stamp(go.number, 0)
        if go.stamp is None:
            state = compiled_init(spec, self._store, self._experiment.seed)()
        elif leave.is_restored:
            specs, shapes = replace(spec.specs, slots={}), spec.abstract()
            snapshots = self._part.snapshots()
            parts = snapshots.load(stamp, part_shapes(specs, shapes, self._num_devices))
            state = compiled_slots(spec, self._store)(place_parts(parts, live, specs, shapes))
            snapshots.forget(but=frozenset({stamp}))
        else:
            shapes = spec.abstract(with_slots=True)
            there = {member.process for member in go.holders}
            parts = None
            if self._part.process in there:
                like = part_shapes(spec.specs, shapes, self._num_devices)
                parts = self._kept.load(stamp, like, is_own=stamp in self._own)
            state = place_parts(parts, live, spec.specs, shapes)
            whole = whole_workers(processes_of(live.topology, by_rank=self._part.by_rank), there)
            has_R = [worker in whole for worker in live.workers]
            if not all(has_R):
                share = compiled_share(spec, self._store, has_R)
                with self._watched(_STUCK_S):
                    state, has_arrived = jax.block_until_ready(share(state))
                if not own_row(has_arrived):
                    raise RunError(f"the state of a peer has not arrived as it was sent, after iteration {stamp.step}")
        self._states[stamp] = jax.block_until_ready(state)
        self._own &= {stamp}
        self._kept.forget(but=frozenset({stamp}))
        if self._handover is not None:
            self._handover.take_back(self._part.process, but=frozenset({stamp}))

    @contextmanager
    def _watched(self, limit_s: float) -> Iterator[None]:
        """Around what cannot be interrupted: called off, it has to end in so many seconds, or the process does."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None

    def _leaving(self) -> Callable[[], None]:
        """See ``CommandListener``: what ends the collectives of the present generation."""
        link, begun = self._link, time.monotonic()

        def abort() -> None:
            if link is not None:
                link.abort()
            limit_s = self._limit_s
            if limit_s is not None and time.monotonic() - begun > limit_s:
                # A connection that broke in the midst of a send may never be reported (see Link.abort); and nobody can
                # be called back from the making of a backend. Whoever takes this place finds the state.
                print(f"cannot be called off for {limit_s:g} s: this process ends", file=sys.stderr, flush=True)
                self._keep_states()
                os._exit(STUCK)

        return abort

    @contextmanager
    def _timed(self, number: int, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._channel.say(Took, number=number, part=part, seconds=round(time.perf_counter() - begun, 4))
