"""A process of a run: forms the epochs that the supervisor orders, and runs the iterations of each.

Between two epochs its part of the state is in shared memory: after the last two iterations, since a peer may not have
finished the last. Everything on devices ends with the epoch; programs come from the run's store.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TextIO

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from swift.data import DataError, check_same_data
from swift.errors import RunError
from swift.launch.buddy import Buddy
from swift.launch.copies import Copies
from swift.launch.handover import Handover
from swift.launch.keep import Keep
from swift.launch.orders import Orders, Voice
from swift.launch.ranks import Programs, is_elastic
from swift.launch.scratch import Scratch
from swift.launch.shift import Shift
from swift.launch.wire import Leave, Order, Unreadable
from swift.mesh import AXES, LiveMesh, own_row
from swift.mesh.cuts import Found
from swift.mesh.distributed import Link, is_called_off
from swift.mesh.epochs import Formed, Left, Member, Process, Ready, Stamp, Took, processes_of, whole_workers
from swift.mesh.sharing import fetch_parts, part_shapes, place_parts
from swift.pipeline import Configuration, Configurator, Program, Steps, TrainState
from swift.pipeline.joining import compiled_init, compiled_share, compiled_slots
from swift.pipeline.program_store import ProgramStore
from swift.train import Experiment
from swift.train.saved_state import split_of

_GRACE_S = 5.0
"""How long whoever cannot go on waits for a newer epoch before it asks for one: somebody's death is found out first."""
_STUCK_S, _STUCK_FACTOR = 5.0, 3.0
"""How long a program may take to see that it was aborted: so long, or so many times as long as it usually takes."""
_LINK_S = 10
_GONE, _STUCK = 70, 71
"""Exit codes of a process whose supervisor is gone, and of one that could not be brought out of an epoch."""


@dataclass(frozen=True)
class Part:
    """What a process is told when it is started.

    Attributes:
        experiment: what is run.
        process: which it is.
        by_rank: whether each expert rank has a process.
        scratch: what it shares with the others.
        keeps_all: keep the state after every window, so that who takes this process's place finds it.
    """

    experiment: Experiment
    process: Process
    by_rank: bool
    scratch: Scratch
    keeps_all: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def gone(self) -> NoReturn:
        """Ends the process, whose supervisor is gone, after removing what all shared."""
        with self._ending:  # a second thread that finds it out must not exit while the first is still removing
            self.scratch.remove()
            os._exit(_GONE)

    def states(self) -> Keep:
        """Where whole states are, between two epochs."""
        return Keep(self.scratch.states, self.process)

    def snapshots(self) -> Keep:
        """Where states without slots are: to be saved, or as they were restored."""
        return Keep(self.scratch.snapshots, self.process)

    def copies(self) -> Copies:
        """Where copies of other ranks' slices are."""
        return Copies(self.scratch.copies)

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with any ranks, see ``swift.mesh.cuts``."""
        return is_elastic(self.experiment, by_rank=self.by_rank)


class Crew:
    """A process that is a member of one epoch after the other.

    Args:
        part: what it is to run.
        commands: of the supervisor, a line each.
    """

    def __init__(self, part: Part, commands: TextIO):
        self._part, self._experiment = part, part.experiment
        corpus = part.scratch.corpus
        self._data = part.experiment.loader("train", corpus), part.experiment.loader("validation", corpus)
        check_same_data(part.scratch.data(), self._data[0].state())
        self._store, self._kept = ProgramStore(part.scratch.programs), part.states()
        # No array of this backend is kept: an epoch has its own.
        self._programs = Programs(part.experiment)
        program = self._programs.on(part.experiment.topology.num_expert_ranks)
        self._configurator = Configurator(self._experiment.plan_settings(program), self._store)
        self._handover: Handover | None = None
        if part.is_elastic:
            everybody = processes_of(part.experiment.topology, by_rank=True)
            self._handover = Handover(part.scratch.handed, part.scratch.snapshots, everybody)
            self._num_classes = split_of(program).num_classes
            self._programs.on(max(1, len(everybody) - 1))  # what is most likely to be needed in a hurry
        clear_backends()
        gc.collect()
        gc.freeze()  # what is here now stays: who leaves an epoch need not look through it for what it leaves behind
        self._num_devices = 1 if part.by_rank else self._experiment.topology.num_expert_ranks
        self._link: Link | None = None
        self._members: tuple[Member, ...] = ()  # of the last epoch
        self._buddy: Buddy | None = None
        self._states: dict[Stamp, TrainState] = {}  # on the devices
        self._saving = threading.Lock()
        self._own: set[Stamp] = set()  # kept by this life of the process
        # Of the iterations whose states may be held; who ran them may have died before it could tell them.
        self._records: dict[int, dict[str, Any]] = self._kept.records()
        self._limit_s: float | None = None  # for what the main thread is in, where it cannot be reached
        self._voice = Voice(part.gone)
        self._orders = Orders(commands, self._leaving, part.gone)

    def run(self) -> None:
        """Forms and runs epochs until the supervisor ends the process."""
        self._voice.say(Ready, number=0)
        number, grace = 0, None
        while True:
            order = self._orders.wait_for_order(number, grace)
            grace = None
            if order is None:
                self._voice.say(Ready, number=number)
                continue
            number = order.form.number
            try:
                self._follow(order)
            except DataError as error:
                # The next epoch keeps the state that all have, and runs no iteration: see ``Supervisor``.
                self._voice.say(Unreadable, number=number, why=str(error))
            except Exception as error:
                if not is_called_off(error):
                    raise
                print(f"epoch {number} ends: {error}", file=sys.stderr)
                grace = _GRACE_S

    def _follow(self, order: Order) -> None:
        """Forms an epoch and runs it, if it is not called off before."""
        number = order.form.number
        self._voice.epoch = self._voice.entered = self._voice.finished = 0
        with self._timed(number, "leave"):
            self._leave()
            self._hand_over(order.form.members)
            present = {member.process.worker for member in order.form.members}
            configuration = self._configurator.configure(frozenset(self._experiment.topology.workers) - present)
            program = self._program_for(len(order.form.members))
        self._voice.say(Left, number=number)
        if not self._orders.may_enter(number):
            return
        steps = self._form(order, configuration, program)
        held = self._kept.stamps()
        self._voice.say(Formed, number=number, held=held, found=self._found(held))
        leave = self._orders.wait_for_go(number)
        if leave is not None:
            with self._timed(number, "state"):
                self._take_up(steps, leave)
            self._shift(order, steps).run(leave)

    def _shift(self, order: Order, steps: Steps) -> Shift:
        part = self._part
        plans = self._configurator.configure(frozenset()).plans
        return Shift(
            part.experiment,
            part.process,
            order,
            steps,
            plans[steps.plan.schedule.problem.num_iterations].period,
            *self._data,
            self._states,
            self._records,
            part.snapshots(),
            self._buddy,
            self._keep_states if part.keeps_all else lambda: None,
            lambda usual_s: self._watched(max(_STUCK_S, _STUCK_FACTOR * usual_s)),
            self._voice,
            self._orders,
        )

    def _leave(self) -> None:
        """Out of the last epoch; what it had on devices is forgotten."""
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

        Then it has what it has kept before, and whoever decides from which state to go on knows what that is.
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
        """What others may need of this process where they are not those of the last epoch."""
        if self._handover is not None and members != self._members:
            lost = {process for process, _ in set(self._members) - set(members)}
            lost |= {process for process in self._handover.processes if process not in {one for one, _ in members}}
            try:
                self._handover.hand_over(self._part.process, self._kept, self._part.copies(), lost)
            except OSError as error:  # the others go on with what there is
                print(f"not all states are handed over: {error}", file=sys.stderr, flush=True)
        self._members = members

    def _found(self, held: frozenset[Stamp]) -> Found:
        if self._handover is None:
            return frozenset()
        return self._handover.found(self._part.process, held, self._num_classes)

    def _program_for(self, num_members: int) -> Program:
        """On the ranks of an epoch; what it takes to find it out leaves nothing on devices."""
        num_ranks = num_members if self._part.is_elastic else self._experiment.topology.num_expert_ranks
        program = self._programs.on(num_ranks)
        clear_backends()
        return program

    def _form(self, order: Order, configuration: Configuration, program: Program) -> Steps:
        """Into the epoch, up to where it can run."""
        number, places, topology = order.form.number, configuration.places, program.live.topology
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
            steps = Steps(program.at(live), configuration, num_sequences, self._store, keep_state=True)
            steps.compiled(steps.main)
        self._buddy = self._buddy_in(steps.program, [process for process, _ in order.form.members])
        return steps

    def _buddy_in(self, program: Program, processes: list[Process]) -> Buddy | None:
        config = self._experiment.checkpoint
        if not (self._part.is_elastic and config.snapshot_every and len(processes) > 1):
            return None
        return Buddy(program, self._store, self._part.copies(), self._part.process, processes, config)

    def _take_up(self, steps: Steps, leave: Leave) -> None:
        """Has the state to go on from on the devices, and no other."""
        program, go = steps.program, leave.go
        live, stamp = program.live, go.stamp or Stamp(go.number, 0)
        if go.stamp is None:
            state = compiled_init(program, self._store, self._experiment.seed)()
        elif leave.is_restored:
            specs, shapes = replace(program.specs, slots={}), program.abstract()
            snapshots = self._part.snapshots()
            parts = snapshots.load(stamp, part_shapes(specs, shapes, self._num_devices))
            state = compiled_slots(program, self._store)(place_parts(parts, live, specs, shapes))
            snapshots.forget(but=frozenset({stamp}))
        else:
            shapes = program.abstract(with_slots=True)
            there = {member.process for member in go.holders}
            parts = None
            if self._part.process in there:
                like = part_shapes(program.specs, shapes, self._num_devices)
                parts = self._kept.load(stamp, like, is_own=stamp in self._own)
            state = place_parts(parts, live, program.specs, shapes)
            whole = whole_workers(processes_of(live.topology, by_rank=self._part.by_rank), there)
            has_R = [worker in whole for worker in live.workers]
            if not all(has_R):
                share = compiled_share(program, self._store, has_R)
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
        """See ``Orders``: what ends the collectives of the present epoch."""
        link, begun = self._link, time.monotonic()

        def abort() -> None:
            if link is not None:
                link.abort()
            limit_s = self._limit_s
            if limit_s is not None and time.monotonic() - begun > limit_s:
                # A connection that broke in the midst of a send may never be told so (see Link.abort); and nobody can
                # be called back from the making of a backend. Whoever takes this place finds the state.
                print(f"cannot be called off for {limit_s:g} s: this process ends", file=sys.stderr, flush=True)
                self._keep_states()
                os._exit(_STUCK)

        return abort

    @contextmanager
    def _timed(self, number: int, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._voice.say(Took, number=number, part=part, seconds=round(time.perf_counter() - begun, 4))
