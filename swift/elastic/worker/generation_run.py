"""The run of one generation by one of its processes: its side of ``swift.train.TrainLoop``, which has the iterations.

``GenerationWorkers`` are the loop's ``LiveWorkers``, ``GenerationStates`` its ``StateKeeper``.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from swift.data.files import DataError
from swift.data.loader import Loader
from swift.elastic.membership.commands import StartGeneration
from swift.elastic.membership.events import Done, PhaseTimed
from swift.elastic.membership.members import Process, Stamp
from swift.elastic.state.neighbour_copies import NeighbourCopies
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.transport.worker_messages import FormGroup, Halt, Planned, Record, SnapshotKept, SnapshotMissed
from swift.elastic.worker.control_channel import CommandListener, ControlChannel
from swift.mesh.process_shards import fetch_shards
from swift.pipeline.reconfigure.block_sharing import saving_rows
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.reconfigure.failure_config import Plan
from swift.pipeline.train_state import TrainState
from swift.train.loop import LiveWorkers, StateKeeper, TrainLoop
from swift.train.settings.experiment import Experiment
from swift.train.step_records import plan_facts
from swift.train.window_rules import is_due, window_length

NUM_SNAPSHOTS = 3
"""Snapshots kept: one being made, one being saved, one waiting."""


@dataclass(kw_only=True)
class GenerationRun:
    """One generation of a run, as one of its processes runs it.

    Attributes:
        experiment: settings of the run.
        process: this process.
        command: command that formed the generation.
        steps: step functions on its mesh.
        fault_free: plan without failures, of as many iterations.
        train: batches of the training split.
        validation: batches of the validation split.
        channel: channel to the supervisor.
        commands: commands of the supervisor.
        abortable: function of the duration of a window, in seconds, that returns the context of calls that may wait for
            another process.
        window_s: longest duration of a window, in seconds.
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
    abortable: Callable[[float], AbstractContextManager[None]]
    window_s: float = 0.0

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self.command.form.number

    @property
    def halt(self) -> Halt | None:
        """Command to stop the run, if it has come."""
        halt = self.commands.halt
        return halt if halt is not None and halt.number == self.number else None

    def computing(self) -> AbstractContextManager[None]:
        """Context of calls that may wait for another process."""
        return self.abortable(self.window_s)


@dataclass(kw_only=True)
class GenerationStates(StateKeeper):
    """The states of a generation, on the devices and in shared memory.

    Attributes:
        generation: the generation.
        states: states on the devices by stamp, the newest two: another process may not finish the last iteration.
        records: records by iteration that may not be written yet.
        snapshots: store of states to be saved and of restored ones.
        copies: copies of another rank's slices; None if none are needed.
        copy_if_due: function that copies the newest state to shared memory, if the next incarnation is to find it.
        restored: stamp of the state that was loaded or resharded for the generation; None if there is none.
        saved: iteration of the newest state kept to be saved; 0 if there is none.
    """

    generation: GenerationRun
    states: dict[Stamp, TrainState]
    records: dict[int, dict[str, Any]]
    snapshots: SharedMemoryStore
    copies: NeighbourCopies | None
    copy_if_due: Callable[[], None]
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
            self.copies.prepare()  # compilation cannot be aborted
            with self.generation.computing():
                self.copies.copy(stamp, state)

    def check(self, record: dict[str, Any]) -> None:
        """Accepts every record: the supervisor checks those of all processes."""

    def is_due(self, done: int) -> bool:
        """Returns whether a checkpoint is due."""
        experiment = self.generation.experiment
        return is_due(done, experiment.checkpoint.every, experiment.num_steps)

    def save(self, state: TrainState, done: int, evaluate: Callable[[], float]) -> None:
        """Keeps a state to be saved, on workers that together have every stage, or chunk."""
        generation = self.generation
        # A record holds the loss before the update. A run about to stop has no time to compile for the loss after it.
        loss = evaluate() if generation.halt is None else None
        spec, stamp = generation.steps.spec, Stamp(generation.number, done)
        if generation.process.worker in [spec.live.workers[row] for row in saving_rows(spec)]:
            try:
                self.snapshots.save(stamp, fetch_shards(replace(state, slots={})))
            except OSError as error:
                generation.channel.send(SnapshotMissed, stamp=stamp, why=str(error))
            else:
                self.snapshots.keep_only(frozenset(sorted(self.snapshots.stamps())[-NUM_SNAPSHOTS:]))
                generation.channel.send(SnapshotKept, stamp=stamp, loss=loss)
        self.saved = done

    def end_window(self) -> None:
        """Copies the state of a window if that is due, and removes the restored one once there are two later ones."""
        self.copy_if_due()
        restored = self.restored
        if restored is not None and restored not in self.states and self.saved != restored.step:
            self.snapshots.keep_only(self.snapshots.stamps() - {restored})

    def end_without_data(self, state: TrainState | None, done: int, error: DataError) -> NoReturn:  # noqa: ARG002
        """Raises the error, which the process reports."""
        try:
            raise error
        finally:
            del error  # its traceback would keep this frame alive, and with it all states of the generation


@dataclass(kw_only=True)
class GenerationWorkers(LiveWorkers):
    """The workers of a generation, which runs until a newer one is to be formed.

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
        return self.steps.plan.relative_period / self.generation.fault_free.relative_period

    def window_after(self, done: int) -> int:
        """Number of iterations in the next window, see ``window_length``."""
        experiment = self.generation.experiment
        periods = (experiment.eval_every, experiment.checkpoint.every)
        if done >= experiment.num_steps:
            return 0
        return window_length(experiment.window, done, experiment.num_steps, periods)

    def is_over(self, done: int) -> bool:
        """Returns whether the run ends here, or another generation takes over."""
        generation = self.generation
        newest, halt = generation.commands.newest, generation.halt
        assert newest is not None
        if done >= generation.experiment.num_steps or (halt is not None and done >= halt.after):
            return True
        after = newest.form.after
        return newest.form.number > generation.number and (after is None or done >= after)

    def enter(self, state: TrainState, first: int, last: int) -> tuple[TrainState, bool]:  # noqa: ARG002
        """Reports the beginning of a window."""
        self._begun = time.perf_counter()
        while self.generation.commands.hangs:
            time.sleep(1.0)
        self.generation.channel.entered = last
        self.generation.channel.send_heartbeat()
        return state, False

    @contextmanager
    def window(self, first: int, last: int) -> Iterator[None]:  # noqa: ARG002
        """Measures the duration of a window."""
        yield
        self.generation.window_s = max(self.generation.window_s, time.perf_counter() - self._begun)

    def computing(self) -> AbstractContextManager[None]:
        """Context of calls that may wait for another process."""
        return self.generation.computing()

    def leave(self, state: TrainState, done: int) -> None:  # noqa: ARG002
        """Reports the end of a window."""
        self.states.end_window()
        channel = self.generation.channel
        if self._is_first:
            seconds = round(time.perf_counter() - self._begun, 4)
            channel.send(PhaseTimed, number=self.generation.number, phase="first_step", seconds=seconds)
        self._is_first = False
        channel.finished = done
        channel.send_heartbeat()


def run_generation(generation: GenerationRun, start: StartGeneration, states: GenerationStates) -> None:
    """Runs a generation until a newer one is to be formed, or to the end of the run.

    Args:
        generation: the generation.
        start: command that started it.
        states: its states; the only one is that from which it continues.
    """
    (stamp,) = states.states
    channel, number = generation.channel, generation.number
    # Two members report records, so that none is lost with one of them; the supervisor takes each iteration once.
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
        loop.save(states.states[stamp], done)  # the processes that kept its parts may have died
    done = loop.run(states.states[stamp], done)
    if generation.halt is not None and states.saved < done:
        loop.save(states.states[max(states.states)], done)
    if generation.halt is not None or done == generation.experiment.num_steps:
        channel.send(Done, number=number)
