"""The iterations of one generation, as one of its processes runs them through ``TrainLoop``."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from swift.data import DataError, Loader
from swift.elastic.membership import Process, Stamp, Took
from swift.elastic.state import NeighbourCopies, SharedMemoryStore
from swift.elastic.transport import (
    Done,
    FormGroup,
    Halt,
    Planned,
    Record,
    SnapshotKept,
    SnapshotMissed,
    StartGeneration,
)
from swift.elastic.worker.control_channel import CommandListener, ControlChannel
from swift.mesh import fetch_parts
from swift.pipeline import Steps, TrainState
from swift.train import Experiment, LiveWorkers, StateKeeper, TrainLoop, is_due, plan_facts, window_length

NUM_SNAPSHOTS = 3
"""Snapshots kept: one being made, one being saved, one waiting."""


@dataclass(kw_only=True)
class GenerationRun:
    """A process's part in one generation of a run.

    Attributes:
        experiment: settings of the run.
        process: this process.
        order: command that formed the generation.
        steps: step functions on its mesh.
        fault_free_period: planned time of an iteration without failures, in the unit of the plan's costs.
        train: batches of the training split.
        validation: batches of the validation split.
        channel: channel to the supervisor.
        orders: commands of the supervisor.
        watched: context of whatever may wait for a peer, given how many seconds a window takes.
        window_s: longest time of a window, in seconds.
    """

    experiment: Experiment
    process: Process
    order: FormGroup
    steps: Steps
    fault_free_period: float
    train: Loader
    validation: Loader
    channel: ControlChannel
    orders: CommandListener
    watched: Callable[[float], AbstractContextManager[None]]
    window_s: float = 0.0

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self.order.form.number

    @property
    def halt(self) -> Halt | None:
        """The order to stop the run, if it has come."""
        halt = self.orders.halt
        return halt if halt is not None and halt.number == self.number else None

    def computing(self) -> AbstractContextManager[None]:
        """Context of whatever may wait for a peer."""
        return self.watched(self.window_s)


@dataclass(kw_only=True)
class GenerationStates(StateKeeper):
    """The states of a generation, on the devices and in shared memory.

    Attributes:
        generation: the generation.
        states: states on the devices by stamp, the newest two: a peer may not finish the last iteration.
        records: records by iteration that may not be written yet.
        snapshots: store of states to be saved and of restored ones.
        copies: copies of another rank's slices; None if none are needed.
        keep: function that puts the states on the devices into shared memory, if every window's is wanted there.
        restored: stamp of the checkpoint that the generation continues from; None if it does not.
        saved: iteration of the newest state kept to be saved; 0 if there is none.
    """

    generation: GenerationRun
    states: dict[Stamp, TrainState]
    records: dict[int, dict[str, Any]]
    snapshots: SharedMemoryStore
    copies: NeighbourCopies | None
    keep: Callable[[], None]
    restored: Stamp | None
    saved: int = 0

    def computed(self, state: TrainState, done: int, records: Sequence[dict[str, Any]]) -> None:
        """Keeps this state and the one before it, and copies slices of another rank if that is due."""
        before = max(self.states)
        for old_step in [step for step in self.records if step < before.step]:
            del self.records[old_step]
        self.records.update({record["step"]: record for record in records})
        for old in self.states.keys() - {before}:
            del self.states[old]
        stamp = Stamp(self.generation.number, done)
        self.states[stamp] = state  # after its records, with which it may be kept at once
        if self.copies is None:
            return
        for record in records:
            self.copies.count(record)
        if self.copies.is_due(done):
            self.copies.make_ready()  # compiles, which cannot be called off
            with self.generation.computing():
                self.copies.take(stamp, state)

    def check(self, record: dict[str, Any]) -> None:
        """Accepts every record: the supervisor checks those of all processes."""

    def is_due(self, done: int) -> bool:
        """Whether a checkpoint is due."""
        experiment = self.generation.experiment
        return is_due(done, experiment.checkpoint.every, experiment.num_steps)

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Keeps a state to be saved, on one worker of each stage."""
        generation = self.generation
        # A record holds the loss before the update. A run about to stop has no time to compile for the loss after it.
        loss = evaluate() if generation.halt is None else None
        live, stamp = generation.steps.spec.live, Stamp(generation.number, done)
        if generation.process.worker in [live.workers[row] for row in live.first_rows]:
            try:
                self.snapshots.save(stamp, fetch_parts(replace(state, slots={})))
            except OSError as error:
                generation.channel.say(SnapshotMissed, stamp=stamp, why=str(error))
            else:
                self.snapshots.forget(but=frozenset(sorted(self.snapshots.stamps())[-NUM_SNAPSHOTS:]))
                generation.channel.say(SnapshotKept, stamp=stamp, loss=loss)
        self.saved = done

    def end_window(self) -> None:
        """Keeps the state of a window, and forgets the restored one once two later ones are there."""
        self.keep()
        restored = self.restored
        if restored is not None and restored not in self.states and self.saved != restored.step:
            self.snapshots.forget(but=self.snapshots.stamps() - {restored})

    def end_without_data(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:  # noqa: ARG002
        """Raises the error, which the process reports."""
        try:
            raise error
        finally:
            del error  # with it this frame, and so all states of the generation, would stay alive


@dataclass(kw_only=True)
class GenerationWorkers(LiveWorkers):
    """The workers of a generation, which runs until a newer one is ordered.

    Attributes:
        generation: the generation.
        states: its states.
    """

    generation: GenerationRun
    states: GenerationStates
    _is_first: bool = True
    _begun: float = field(default_factory=time.perf_counter)

    @property
    def steps(self) -> Steps:
        """Step functions on the generation's mesh."""
        return self.generation.steps

    @property
    def period_ratio(self) -> float:
        """Planned time of an iteration, as a multiple of that without failures."""
        return self.steps.plan.period / self.generation.fault_free_period

    def window_after(self, done: int) -> int:
        """Number of iterations in the next window, see ``window_length``."""
        experiment = self.generation.experiment
        periods = (experiment.eval_every, experiment.checkpoint.every)
        if done >= experiment.num_steps:
            return 0
        return window_length(experiment.window, done, experiment.num_steps, periods)

    def is_over(self, done: int) -> bool:
        """Whether the run ends here, or another generation takes over."""
        generation = self.generation
        newest, halt = generation.orders.newest, generation.halt
        assert newest is not None
        if done >= generation.experiment.num_steps or (halt is not None and done >= halt.after):
            return True
        after = newest.form.after
        return newest.form.number > generation.number and (after is None or done >= after)

    def enter(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:  # noqa: ARG002
        """Reports that a window begins."""
        self._begun = time.perf_counter()
        while self.generation.orders.hangs:
            time.sleep(1.0)
        self.generation.channel.entered = last
        self.generation.channel.tell_progress()
        return state, False

    @contextmanager
    def window(self, first: int, last: int) -> Iterator[None]:  # noqa: ARG002
        """Notes how long a window takes."""
        yield
        self.generation.window_s = max(self.generation.window_s, time.perf_counter() - self._begun)

    def computing(self) -> AbstractContextManager[None]:
        """Context of whatever may wait for a peer."""
        return self.generation.computing()

    def leave(self, state: TrainState, done: int) -> None:  # noqa: ARG002
        """Reports that a window is finished."""
        self.states.end_window()
        channel = self.generation.channel
        if self._is_first:
            took_s = round(time.perf_counter() - self._begun, 4)
            channel.say(Took, number=self.generation.number, part="first_step", seconds=took_s)
        self._is_first = False
        channel.finished = done
        channel.tell_progress()


def run_generation(generation: GenerationRun, start: StartGeneration, states: GenerationStates) -> None:
    """Runs a generation until a newer one is ordered, or to the end of the run.

    Args:
        generation: the generation.
        start: command that started it.
        states: its states; the only one is that from which it continues.
    """
    (stamp,) = states.states
    channel, number = generation.channel, generation.number
    # Two record, so that the line of an iteration is not lost with one of them; the supervisor takes one of each.
    members = start.go.holders or generation.order.form.members
    is_recorder = generation.process in [member.process for member in members[:2]]

    def record(record: dict[str, Any]) -> None:
        if is_recorder:
            channel.say(Record, record=record)

    workers = GenerationWorkers(generation=generation, states=states)
    loop = TrainLoop(generation.experiment, generation.train, generation.validation, workers, states, record)
    done = stamp.step
    channel.generation, channel.finished = number, done
    if is_recorder and not generation.steps.spec.is_single_worker:
        channel.say(Planned, number=number, facts=plan_facts(generation.steps))
    if start.written < done:
        unwritten = [record for step, record in sorted(states.records.items()) if start.written < step <= done]
        loop.finish(states.states[stamp], done, unwritten)
    elif done and states.is_due(done) and (start.go.holders or not start.is_restored):
        loop.save(states.states[stamp], done)  # its parts may have been lost with those who had them
    done = loop.run(states.states[stamp], done)
    if generation.halt is not None and states.saved < done:
        loop.save(states.states[max(states.states)], done)
    if generation.halt is not None or done == generation.experiment.num_steps:
        channel.say(Done, number=number)
