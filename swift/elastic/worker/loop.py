"""The iterations of one generation, as one of its members runs them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax

from swift.data import Batch, Loader
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
from swift.pipeline import Steps, Sums, TrainState
from swift.train import Experiment, is_due, mean_loss, plan_facts, step_record, window_length

NUM_SNAPSHOTS = 3
"""One that is made, one that is saved, one that waits."""


@dataclass
class IterationLoop:
    """A member's work in a generation.

    Attributes:
        experiment: what is run.
        process: which this is.
        order: of the generation.
        steps: its programs.
        fault_free: planned time of an iteration without failures.
        train, validation: the data.
        states: on the devices, by stamp; the newest two, in case that a peer does not finish the last iteration.
        records: of the iterations that may not be written yet.
        snapshots: where states to be saved go, and those that were restored come from.
        buddy: copies another rank's slices; None: nobody asks for it.
        after_window: called when its state is there.
        watched: around what may wait for a peer for ever; told how many seconds it usually takes.
        channel, orders: to and from the supervisor.
    """

    experiment: Experiment
    process: Process
    order: FormGroup
    steps: Steps
    fault_free: float
    train: Loader
    validation: Loader
    states: dict[Stamp, TrainState]
    records: dict[int, dict[str, Any]]
    snapshots: SharedMemoryStore
    buddy: NeighbourCopies | None
    after_window: Callable[[], None]
    watched: Callable[[float], AbstractContextManager[None]]
    channel: ControlChannel
    orders: CommandListener
    _is_recorder: bool = False
    _saved: int = 0
    _usual_s: float = 0.0

    @property
    def number(self) -> int:
        """Of the generation."""
        return self.order.form.number

    @property
    def _halt(self) -> Halt | None:
        halt = self.orders.halt
        return halt if halt is not None and halt.number == self.number else None

    def run(self, leave: StartGeneration) -> None:
        """Runs until an order comes, or to the end."""
        (stamp,) = self.states
        done, experiment = stamp.step, self.experiment
        # Two, so that the line of an iteration is not lost with who was to tell it; the supervisor takes one of each.
        members = leave.go.holders or self.order.form.members
        self._is_recorder = self.process in [member.process for member in members[:2]]
        self.channel.generation, self.channel.finished = self.number, done
        if self._is_recorder and not self.steps.spec.is_single_worker:
            self.channel.say(Planned, number=self.number, facts=plan_facts(self.steps))
        if leave.written < done:
            self._finish([record for step, record in sorted(self.records.items()) if leave.written < step <= done])
        elif done and self._is_due(done, experiment.checkpoint.every) and (leave.go.holders or not leave.is_restored):
            self._snapshot()  # its parts may have been lost with who had them
        while not self._is_over(done):
            begun = time.perf_counter()
            periods = (experiment.eval_every, experiment.checkpoint.every)
            count = window_length(experiment.window, done, experiment.num_steps, periods)
            while self.orders.hangs:
                time.sleep(1.0)
            self.channel.entered = done + count
            self.channel.tell_progress()
            done = self._window(done, count, begun)
            if self.channel.finished == stamp.step:
                took_s = round(time.perf_counter() - begun, 4)
                self.channel.say(Took, number=self.number, part="first_step", seconds=took_s)
            self.channel.finished = done
            self.channel.tell_progress()
            if leave.is_restored and stamp not in self.states and self._saved != stamp.step:
                self.snapshots.forget(but=self.snapshots.stamps() - {stamp})  # until now it may have been needed again
        halt = self._halt
        if halt is not None and self._saved < done:
            self._snapshot()
        if halt is not None or done == experiment.num_steps:
            self.channel.say(Done, number=self.number)

    def _window(self, done: int, count: int, begun: float) -> int:
        """Some iterations as one program; leaves two states, that before and its own."""
        steps, before = self.steps, max(self.states)
        batches = [self.train.batch(step) for step in range(done, done + count)]
        steps.compiled("single" if count == 1 else steps.main)  # which cannot be called off
        with self.watched(self._usual_s):
            outcome = steps.start(self.states[before], batches, steps.put(batches))()
            jax.block_until_ready(outcome.state)
        self._usual_s = max(self._usual_s, time.perf_counter() - begun)
        done += count
        step_s = (time.perf_counter() - begun) / count
        records = [
            step_record(step, metrics, step_s, steps.spec) | self._plan_record(outcome.was_discarded)
            for step, metrics in enumerate(outcome.metrics, done - count + 1)
        ]
        for old_step in [step for step in self.records if step < before.step]:
            del self.records[old_step]
        self.records.update({record["step"]: record for record in records})
        for old in self.states.keys() - {before}:
            del self.states[old]
        self.states[Stamp(self.number, done)] = outcome.state  # after its records, with which it may be kept at once
        self._copy(records)
        self._finish(records)
        self.after_window()
        return done

    def _copy(self, records: list[dict[str, Any]]) -> None:
        """Has the slices of another rank copied, where that is due."""
        if self.buddy is None:
            return
        for record in records:
            self.buddy.count(record)
        newest = max(self.states)
        if self.buddy.is_due(newest.step):
            self.buddy.make_ready()  # which cannot be called off
            with self.watched(self._usual_s):
                self.buddy.take(newest, self.states[newest])

    def _plan_record(self, was_discarded: bool) -> dict[str, Any]:
        """What the plan says of an iteration; nothing for a lone worker."""
        if self.steps.spec.is_single_worker:
            return {}
        plan = self.steps.plan
        ratio = plan.period / self.fault_free
        return {"bubble_share": plan.bubble_share, "period_ratio": ratio, "was_discarded": was_discarded}

    def _finish(self, records: list[dict[str, Any]]) -> None:
        """Evaluates and keeps what is due after an iteration, and tells what the iterations were."""
        done = max(self.states).step
        if self._is_due(done, self.experiment.eval_every):
            loss = self._evaluate(self.experiment.num_eval_batches)
            for record in records[-1:]:
                record["validation_loss"] = loss
        if self._is_recorder:
            for record in records:
                self.channel.say(Record, record=record)
        if self._is_due(done, self.experiment.checkpoint.every):
            self._snapshot()

    def _snapshot(self) -> None:
        """Keeps the state to be saved; one worker of each stage does."""
        newest = max(self.states)
        # What is recorded is of the parameters before the update. A run that is to stop has no time to compile for it.
        loss = self._evaluate(1) if self._halt is None else None
        live, stamp = self.steps.spec.live, Stamp(self.number, newest.step)
        if self.process.worker in [live.workers[row] for row in live.first_rows]:
            try:
                self.snapshots.save(stamp, fetch_parts(replace(self.states[newest], slots={})))
            except OSError as error:
                self.channel.say(SnapshotMissed, stamp=stamp, why=str(error))
            else:
                self.snapshots.forget(but=frozenset(sorted(self.snapshots.stamps())[-NUM_SNAPSHOTS:]))
                self.channel.say(SnapshotKept, stamp=stamp, loss=loss)
        self._saved = newest.step

    def _evaluate(self, num_batches: int) -> float:
        state = self.states[max(self.states)]
        self.steps.compiled("evaluate")  # which cannot be called off

        def evaluate(batch: Batch) -> Sums:
            with self.watched(self._usual_s):
                return self.steps.evaluate(state, batch)

        return mean_loss(evaluate, self.validation, num_batches)

    def _is_due(self, done: int, every: int) -> bool:
        return is_due(done, every, self.experiment.num_steps)

    def _is_over(self, done: int) -> bool:
        newest, halt = self.orders.newest, self._halt
        assert newest is not None
        if done >= self.experiment.num_steps or (halt is not None and done >= halt.after):
            return True
        after = newest.form.after
        return newest.form.number > self.number and (after is None or done >= after)
