"""The training loop with stand-ins for its parts: their order, and data that cannot be read any more."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from swift.data.loader import SourceBatches
from swift.data.sources import DataError
from swift.pipeline.reconfigure.compiled_steps import WindowResult
from swift.train import loop as loop_module
from swift.train.loop import TrainLoop

LAST = 6


class Loop(TrainLoop):
    """Its records have the step alone."""

    def _records(self, outcome, first, _):
        return [{"step": step} for step in range(first, first + len(outcome.metrics))]


class Parts:
    """Live workers whose state is the number of iterations done, and stores of states and records, noting all calls."""

    def __init__(self, unreadable=None, window=2):
        self.calls, self.unreadable, self.window_length = [], unreadable, window
        self.steps = SimpleNamespace(main="window", put=list, start=self.start)

    def start(self, state, batches, rows):
        assert rows == batches == list(range(state, state + len(batches)))
        self.calls.append(f"start {state}")
        return lambda: WindowResult(state + len(batches), [{}] * len(batches), was_discarded=False)

    def next_window_length(self, done):
        return min(self.window_length, LAST - done)

    def should_stop(self, done):
        return done >= LAST

    def begin_window(self, state, first, last):
        self.calls.append(f"enter {first}-{last}")
        return state, False

    def compile(self, kind):
        """Nothing has to be compiled."""

    def window(self, *_):
        return nullcontext()

    def abortable(self):
        return nullcontext()

    def end_window(self, _, done):
        self.calls.append(f"leave {done}")

    def record_window(self, state, done, _):
        assert state == done
        self.calls.append(f"computed {done}")

    def check(self, record):
        self.calls.append(f"check {record['step']}")

    def validated(self, done, _):
        self.calls.append(f"validated {done}")

    def is_due(self, done):
        return done == 4

    def save(self, _, done, __):
        self.calls.append(f"save {done}")

    def fail_on_data_error(self, state, done, error):
        self.calls.append(f"end {state} {done}")
        raise error

    def record(self, record):
        self.calls.append(f"record {record}")

    def batch(self, step):
        self.calls.append(f"read {step}")
        if step == self.unreadable:
            raise DataError("gone")
        return step


def loop(parts, eval_every=0):
    experiment = SimpleNamespace(eval_every=eval_every, num_eval_batches=1, num_steps=LAST)
    return Loop(experiment, parts, parts, parts, parts, parts.record)


def test_the_next_window_is_read_while_the_devices_compute_and_all_that_is_due_comes_before_it():
    parts = Parts()
    assert loop(parts).run(2, 2) == LAST
    assert parts.calls == [
        *("read 2", "read 3", "enter 3-4", "start 2", "read 4", "read 5", "computed 4"),
        *("check 3", "record {'step': 3}", "check 4", "record {'step': 4}", "save 4", "leave 4"),
        *("enter 5-6", "start 4", "computed 6"),
        *("check 5", "record {'step': 5}", "check 6", "record {'step': 6}", "leave 6"),
    ]


@pytest.mark.parametrize(("unreadable", "end"), [(0, "end None 0"), (3, "end 2 2")])
def test_batches_that_cannot_be_read_end_the_run_after_the_iterations_before_them(unreadable, end):
    parts = Parts(unreadable)
    with pytest.raises(DataError):
        loop(parts).run(0, 0)
    assert parts.calls[-1] == end
    assert ("leave 2" in parts.calls) == (unreadable == 3)
    assert "enter 3-4" not in parts.calls


def test_a_record_is_written_though_its_validation_data_cannot_be_read(monkeypatch):
    def evaluate(*_):
        raise DataError("gone")

    monkeypatch.setattr(Loop, "validate", evaluate)
    parts = Parts()
    with pytest.raises(DataError):
        loop(parts, eval_every=2).run(0, 0)
    assert parts.calls[-2:] == ["record {'step': 2}", "end 2 2"]


def test_the_loss_of_an_evaluation_stands_in_the_record_of_its_iteration(monkeypatch):
    monkeypatch.setattr(Loop, "validate", lambda *_: {"validation_loss": 0.5})
    parts = Parts()
    loop(parts, eval_every=4).run(0, 0)
    evaluated = [call for call in parts.calls if "validation_loss" in call]
    assert evaluated == [f"record {{'step': {step}, 'validation_loss': 0.5}}" for step in (4, 6)]


def test_reading_is_a_part_of_the_iteration_in_which_it_happens(monkeypatch):
    """A batch that is slow to read is longer than the iteration that computes on it, and not than the one before."""
    seconds, times = 0.0, []

    class Slow(Parts):
        def batch(self, step):
            nonlocal seconds
            seconds += 9.0 if step == 3 else 0.5
            return super().batch(step)

    class Timed(Loop):
        def _records(self, outcome, first, times_of_window):
            times.append(tuple(times_of_window))
            return super()._records(outcome, first, times_of_window)

    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: seconds))
    parts = Slow(window=1)
    Timed(SimpleNamespace(eval_every=0, num_steps=LAST), parts, parts, parts, parts, parts.record).run(0, 0)
    assert times == [(1.0, 1.0), (0.5, 0.5), (9.0, 9.0), (0.5, 0.5), (0.5, 0.5), (0.0, 0.0)]


def test_a_single_batch_is_evaluated_before_a_save(monkeypatch):
    """Whatever the number of sources and of batches."""
    parts, losses = Parts(), []
    parts.parts = [SourceBatches(name, 0.5, range(10 * at, 10 * at + 9)) for at, name in enumerate(("web", "books"))]
    parts.num_bytes = lambda _: None
    parts.steps.evaluate = lambda *_: SimpleNamespace(loss=6.0, tokens=2, weight=None)
    monkeypatch.setattr(parts, "save", lambda _, __, loss: losses.append(loss()))
    loop(parts).save(4, 4)
    assert losses == [3.0]
    assert parts.calls == ["read 0"]
