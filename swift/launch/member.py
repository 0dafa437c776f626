"""A process of a run: forms the epochs that the supervisor orders, and runs the iterations of each.

Between two epochs its part of the state is on the host: after the last two iterations, since a peer may not have
finished the last. Everything on devices ends with the epoch; programs come from the run's store.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from swift.launch.orders import Orders, Voice
from swift.launch.wire import Order, done_line, formed_line, ready_line
from swift.mesh import AXES, LiveMesh, own_row, storage_mesh
from swift.mesh.distributed import Link, is_broken_collective
from swift.mesh.epochs import Go, Member
from swift.mesh.sharing import fetch_parts, place_parts, share_rows
from swift.pipeline import Configurator, Steps, TrainState
from swift.pipeline.program_store import ProgramStore
from swift.record import CONFIG, RunDirectory, read_run
from swift.topology import Worker
from swift.train import Experiment
from swift.train.metrics import step_record
from swift.train.recovery import window_length


@dataclass(frozen=True)
class Part:
    """What a process is told when it is started.

    Attributes:
        experiment: what is run.
        config_text: its operative configuration.
        worker: whom the process is.
        run_dir: the run directory, which the first member of an epoch writes.
        programs: the directory of the run's programs.
    """

    experiment: Experiment
    config_text: str
    worker: Worker
    run_dir: Path
    programs: Path


@dataclass(frozen=True)
class _Epoch:
    """An epoch that this process has formed."""

    order: Order
    steps: Steps

    @property
    def live(self) -> LiveMesh:
        return self.steps.program.live

    def recorder(self, holders: tuple[Member, ...]) -> Worker:
        """Who keeps the record: the first who knows the metrics of the iterations so far."""
        has_R = self.has_R(holders)
        return self.live.workers[has_R.index(True) if any(has_R) else 0]

    def has_R(self, holders: tuple[Member, ...]) -> list[bool]:
        """For every row, whether its process has the state."""
        there = {member.process.worker for member in holders}
        return [worker in there for worker in self.live.workers]


class Crew:
    """A process that is a member of one epoch after the other.

    Args:
        part: what it is to run.
        commands: of the supervisor, a line each.
    """

    def __init__(self, part: Part, commands: TextIO):
        self._part, self._experiment = part, part.experiment
        self._loader = part.experiment.loader("train")
        self._store = ProgramStore(part.programs)
        # Nothing of this backend is kept: an epoch has its own.
        settings = self._experiment.plan_settings(self._experiment.program(storage_mesh(self._experiment.topology)))
        self._configurator = Configurator(settings)
        clear_backends()
        self._link: Link | None = None
        self._held: dict[int, Any] = {}
        self._records: list[dict[str, Any]] = []  # of the iterations whose states may be held
        self._voice = Voice()
        self._orders = Orders(commands, self._abort)

    def run(self) -> None:
        """Forms and runs epochs until the supervisor ends the process."""
        self._voice.say(ready_line())
        number = 0
        while True:
            order = self._orders.wait_for_order(number)
            number = order.form.number
            try:
                self._follow(order)
            except Exception as error:
                # A newer epoch is on its way, since somebody has died or somebody has called this one off.
                if not is_broken_collective(error):
                    raise

    def _follow(self, order: Order) -> None:
        """Forms an epoch and runs it, if it is not called off before; what it has on devices is forgotten then."""
        epoch = self._form(order)
        self._voice.say(formed_line(order.form.number, self._held))
        go = self._orders.wait_for_go(order.form.number)
        if go is not None:
            self._run_epoch(epoch, go)

    def _abort(self) -> None:
        link = self._link
        if link is not None:
            link.abort()

    def _form(self, order: Order) -> _Epoch:
        """Out of the last epoch, and into this one up to where it can run."""
        if self._link is not None:
            self._link.leave()
        self._link, experiment = None, self._experiment
        self._voice.epoch = self._voice.entered = self._voice.finished = 0
        present = {member.process.worker for member in order.form.members}
        configuration = self._configurator.configure(frozenset(experiment.topology.workers) - present)
        places = configuration.places
        index = [place.worker for place in places].index(self._part.worker)
        self._link = Link(order.address, index, len(places))
        live = LiveMesh(experiment.topology, places, Mesh(self._link.grid(experiment.topology.num_expert_ranks), AXES))
        program = experiment.program(live)
        steps = Steps(program, configuration, experiment.sequences_per_microbatch, self._store, keep_state=True)
        steps.compiled(steps.main)
        return _Epoch(order, steps)

    def _run_epoch(self, epoch: _Epoch, go: Go) -> None:
        """Runs until an order comes, or to the end; keeps its part of the newest states on the host."""
        with ExitStack() as stack:
            state = self._state(epoch, go)
            is_recorder = epoch.recorder(go.holders) == self._part.worker
            directory = stack.enter_context(self._record(go)) if is_recorder else None
            states = {int(own_row(state.step)): state}
            self._held = {}
            try:
                self._iterate(epoch, states, directory)
            finally:
                self._held = {step: fetch_parts(state) for step, state in states.items()}
        if self._experiment.num_steps in self._held:
            self._voice.say(done_line())

    def _state(self, epoch: _Epoch, go: Go) -> TrainState:
        program = epoch.steps.program
        if go.step is None:
            return program.init(jax.random.key(self._experiment.seed))
        parts, has_R = self._held.get(go.step), epoch.has_R(go.holders)
        state = place_parts(parts, epoch.live, program.specs, program.abstract(with_slots=True))
        return state if all(has_R) else jax.jit(share_rows(epoch.live, program.specs, has_R))(state)

    def _record(self, go: Go) -> RunDirectory:
        part = self._part
        if not (part.run_dir / CONFIG).exists():
            return RunDirectory.create(part.run_dir, part.config_text)
        # Who kept the record may have died between an iteration and its line.
        done = go.step or 0
        written = min(done, max((record["step"] for record in read_run(part.run_dir).metrics), default=0))
        directory = RunDirectory.resume(part.run_dir, part.config_text, written)
        for record in self._records:
            if written < record["step"] <= done:
                directory.log_step(record)
        return directory

    def _iterate(self, epoch: _Epoch, states: dict[int, TrainState], directory: RunDirectory | None) -> None:
        """Iterations, each of which leaves two states: that before, in case that a peer does not finish it."""
        voice, steps, experiment = self._voice, epoch.steps, self._experiment
        (done,) = states
        voice.epoch, voice.finished = epoch.order.form.number, done
        while not self._is_over(epoch, done):
            begun = time.perf_counter()
            count = window_length(experiment.window, done, experiment.num_steps, ())
            voice.entered = done + count
            voice.tell_progress()
            batches = [self._loader.batch(step) for step in range(done, done + count)]
            outcome = steps.start(states[done], batches, steps.put(batches))()
            jax.block_until_ready(outcome.state)
            if len(states) > 1:
                del states[min(states)]
            done += count
            states[done] = outcome.state
            voice.finished = done
            voice.tell_progress()
            step_s = (time.perf_counter() - begun) / count
            records = [
                step_record(step, metrics, step_s, epoch.live.num_rows)
                for step, metrics in enumerate(outcome.metrics, done - count + 1)
            ]
            self._records = [record for record in self._records if record["step"] > min(states)] + records
            if directory is not None:
                for record in records:
                    directory.log_step(record)

    def _is_over(self, epoch: _Epoch, done: int) -> bool:
        newest = self._orders.newest
        assert newest is not None
        if done == self._experiment.num_steps:
            return True
        after = newest.form.after
        return newest.form.number > epoch.order.form.number and (after is None or done >= after)
