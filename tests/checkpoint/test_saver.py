"""The saver, which decides for both writers, in all orders of requests, failures and deaths; no files, no clocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.checkpoint.saver import (
    RETRY_PAUSES_S,
    Draining,
    FailureReport,
    FallbackRequested,
    RecordWritten,
    Saver,
    TimePassed,
    Write,
    WriteFailed,
    WriterAction,
    WriterDied,
    WriteRequest,
    WriterNeeded,
    Written,
)

START_S, DEADLINE_S = 10.0, 30.0
THREAD, PROCESS = Saver(), Saver(start_s=START_S, deadline_s=DEADLINE_S, is_running=False)
RUNNING = PROCESS.on(WriterNeeded(), 0.0)[0]
START, KILL, GIVE_UP = WriterAction
LOAD, RESHARD = WriteRequest("load"), WriteRequest("reshard", 4)
FULL, OK, DIED, LATER, AWAKE = WriteFailed("full"), Written(), WriterDied(), TimePassed(), TimePassed(has_slept=True)


def save(step):
    return WriteRequest("save", step)


def fallback(step):
    return WriteRequest("fallback", step)


def ask(request):
    return request if isinstance(request, WriteRequest) else save(request)


def write(request):
    return Write(request if isinstance(request, WriteRequest) else save(request))


def report(step, pause=None):
    return FailureReport(save(step), "full" if pause is None else f"full; trying again in {pause} s")


TABLE = {
    "a thread writes what is asked for": (THREAD, [(0, ask(5), [write(5)]), (9, OK, []), (9, ask(10), [write(10)])]),
    "an idle process is asked at once": (RUNNING, [(20, ask(5), [write(5)]), (21, OK, [])]),
    "a process starts for its first request": (PROCESS, [(0, ask(5), [START, write(5)]), (1, WriterNeeded(), [])]),
    "a failed save is retried after each pause and then given up": (
        THREAD,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (1.9, LATER, []), (2, LATER, [write(5)])],
            *[(3, FULL, [report(5, 5)]), (7.9, LATER, []), (8, LATER, [write(5)]), (8, FULL, [report(5, 10)])],
            *[(17, LATER, []), (18, LATER, [write(5)]), (18, FULL, [report(5, 20)]), (38, LATER, [write(5)])],
            *[(99, LATER, []), (99, FULL, [report(5)]), (999, LATER, [])],
        ],
    ),
    "pauses begin again with the next save": (
        THREAD,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)]), (3, OK, [])],
            *[(4, ask(10), [write(10)]), (4, FULL, [report(10, 2)])],
        ],
    ),
    "an error that stays is not retried": (
        THREAD,
        [(0, ask(5), [write(5)]), (0, WriteFailed("full", is_final=True), [report(5)]), (99, LATER, [])],
    ),
    "who waits ends the pause, and the next failure is final": (
        THREAD,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (1, Draining(), [write(5)]), (1, FULL, [report(5)])],
            *[(9, LATER, []), (9, ask(6), [write(6)]), (9, FULL, [report(6, 2)])],
        ],
    ),
    "an attempt that fails while somebody waits is the last": (
        THREAD,
        [(0, ask(5), [write(5)]), (1, Draining(), []), (2, FULL, [report(5)]), (99, LATER, [])],
    ),
    "who waits for a save that succeeds or is given up changes nothing": (
        THREAD,
        [(0, ask(5), [write(5)]), (0, OK, []), (1, Draining(), []), (1, LATER, [])],
    ),
    "an outcome without a request is no outcome": (THREAD, [(0, FULL, []), (0, OK, []), (0, ask(5), [write(5)])]),
    "a newer save replaces one that waits": (
        RUNNING,
        [(0, ask(5), [write(5)]), (1, ask(10), []), (2, ask(15), []), (3, OK, [write(15)]), (4, OK, [])],
    ),
    "a newer save replaces one that has failed": (
        RUNNING,
        [(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (1, ask(10), [write(10)]), (1, OK, []), (99, LATER, [])],
    ),
    "a failed save is not retried if a newer one waits": (
        RUNNING,
        [(0, ask(5), [write(5)]), (1, ask(10), []), (2, FULL, [report(5), write(10)]), (3, OK, []), (99, LATER, [])],
    ),
    "a reshard does not end retries": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, ask(RESHARD), []), (1, FULL, [report(5, 2), write(RESHARD)])],
            *[(4, LATER, []), (5, OK, [write(5)])],
        ],
    ),
    "a failed load or reshard is its sender's affair": (
        RUNNING,
        [(0, ask(LOAD), [write(LOAD)]), (0, FULL, []), (0, ask(RESHARD), [write(RESHARD)]), (0, FULL, [])],
    ),
    "a failed save is retried once before a load, and then no more": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (1, ask(LOAD), [write(5)])],
            *[(1, FULL, [report(5), write(LOAD)]), (1, OK, []), (99, LATER, []), (99, FallbackRequested(), [])],
        ],
    ),
    "a retry that is under way is not repeated for a load": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)]), (2, ask(LOAD), [])],
            *[(3, FULL, [report(5), write(LOAD)])],
        ],
    ),
    "a late process is killed once, and the next has as long": (
        PROCESS,
        [
            *[(0, ask(5), [START, write(5)]), (40, LATER, []), (41, LATER, [KILL]), (99, LATER, [])],
            *[(100, DIED, [START, write(5)]), (140, LATER, []), (141, LATER, [KILL])],
        ],
    ),
    "a process that has started has no time to start": (
        RUNNING,
        [(10, ask(5), [write(5)]), (40, LATER, []), (40.1, LATER, [KILL])],
    ),
    "a process that has answered has started": (
        PROCESS,
        [(0, ask(5), [START, write(5)]), (1, OK, []), (2, ask(6), [write(6)]), (32, LATER, []), (33, LATER, [KILL])],
    ),
    "a process without a request is not late": (RUNNING, [(999, LATER, [])]),
    "each request has a deadline of its own": (
        RUNNING,
        [
            *[(10, ask(5), [write(5)]), (10, ask(LOAD), []), (40, OK, [write(LOAD)]), (70, LATER, [])],
            *[(71, LATER, [KILL])],
        ],
    ),
    "nothing is killed after a sleep of the machine": (RUNNING, [(10, ask(5), [write(5)]), (999, AWAKE, [])]),
    "a process that is being killed gets no further request": (
        RUNNING,
        [
            *[(10, ask(5), [write(5)]), (41, LATER, [KILL]), (41, OK, []), (41, ask(10), [])],
            *[(42, DIED, [START, write(10)])],
        ],
    ),
    "the next process gets the newest save only": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (1, ask(10), []), (1, ask(LOAD), []), (2, DIED, [START, write(10)])],
            *[(3, OK, [write(LOAD)])],
        ],
    ),
    "the next process gets a save again that a load waits for": (
        RUNNING,
        [(0, ask(5), [write(5)]), (1, ask(LOAD), []), (2, DIED, [START, write(5)]), (3, OK, [write(LOAD)])],
    ),
    "who dies three times over a request is given up": (
        PROCESS,
        [
            *[(0, ask(5), [START, write(5)]), (1, DIED, [START, write(5)]), (2, DIED, [START, write(5)])],
            *[(3, DIED, [GIVE_UP]), (4, LATER, []), (5, FallbackRequested(), [START, write(fallback(5))])],
        ],
    ),
    "the newest of the states that a dead writer leaves is kept elsewhere": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, ask(LOAD), []), (0, ask(6), []), (1, DIED, [START, write(5)])],
            *[
                (2, DIED, [START, write(5)]),
                (3, DIED, [GIVE_UP]),
                (4, FallbackRequested(), [START, write(fallback(6))]),
            ],
            (5, OK, []),
        ],
    ),
    "an answer makes up for deaths": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (1, DIED, [START, write(5)]), (2, DIED, [START, write(5)]), (3, OK, [])],
            *[(4, ask(6), [write(6)]), (5, DIED, [START, write(6)]), (6, DIED, [START, write(6)]), (7, OK, [])],
        ],
    ),
    "a save waits for its record": (
        RUNNING,
        [
            *[(0, RecordWritten(9, 4), []), (0, ask(5), []), (999, LATER, []), (999, DIED, [START])],
            *[(999, RecordWritten(9, 5), [write(5)]), (1000, LATER, [])],
        ],
    ),
    "a save does not wait for a record that is lost": (
        RUNNING,
        [(0, RecordWritten(4, 4), []), (0, ask(5), []), (9.9, LATER, []), (10, LATER, [write(5)])],
    ),
    "a save whose record is lost does not hold up a load": (
        RUNNING,
        [(0, RecordWritten(4, 4), []), (0, ask(5), []), (0, ask(LOAD), [write(5)])],
    ),
    "a load waits for a save and its record": (
        RUNNING,
        [
            *[(0, RecordWritten(5, 4), []), (0, ask(5), []), (0, ask(LOAD), []), (9, RecordWritten(5, 5), [write(5)])],
            (9, OK, [write(LOAD)]),
        ],
    ),
    "a newer save replaces one that waits for its record": (
        RUNNING,
        [
            *[(0, RecordWritten(10, 4), []), (0, ask(5), []), (1, ask(10), []), (2, RecordWritten(10, 5), [])],
            (3, RecordWritten(10, 10), [write(10)]),
        ],
    ),
    "what waits for its record in the end is kept elsewhere": (
        RUNNING,
        [
            *[(0, RecordWritten(9, 4), []), (0, ask(5), []), (1, FallbackRequested(), [write(fallback(5))])],
            *[(2, OK, []), (3, FallbackRequested(), [])],
        ],
    ),
    "what has failed is kept elsewhere in the end, once": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (1, FallbackRequested(), [write(fallback(5))])],
            *[(1, FallbackRequested(), []), (2, FULL, [FailureReport(fallback(5), "full")]), (99, LATER, [])],
            (99, FallbackRequested(), []),
        ],
    ),
    "a retry that succeeds leaves nothing unsaved": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)]), (3, OK, [])],
            *[(3, FallbackRequested(), []), (3, ask(LOAD), [write(LOAD)])],
        ],
    ),
    "a retry that succeeds makes the fallback needless": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)])],
            *[(3, FallbackRequested(), []), (4, OK, []), (99, LATER, [])],
        ],
    ),
    "a retry that fails is followed by the fallback": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)])],
            *[(3, FallbackRequested(), []), (4, FULL, [report(5), write(fallback(5))])],
        ],
    ),
    "a process that dies over a retry gets the fallback next": (
        RUNNING,
        [
            *[(0, ask(5), [write(5)]), (0, FULL, [report(5, 2)]), (2, LATER, [write(5)])],
            *[(3, FallbackRequested(), []), (4, DIED, [START, write(fallback(5))])],
        ],
    ),
    "nothing is kept elsewhere if all is saved": (
        RUNNING,
        [(0, ask(5), [write(5)]), (1, OK, []), (1, FallbackRequested(), []), (1, LATER, [])],
    ),
    "a state that is not finite is kept nowhere": (
        THREAD,
        [
            *[(0, ask(5), [write(5)]), (0, WriteFailed("full", is_final=True, is_invalid=True), [report(5)])],
            (1, FallbackRequested(), []),
        ],
    ),
}


@pytest.mark.parametrize(("saver", "rows"), TABLE.values(), ids=TABLE)
def test_each_event_has_these_actions(saver, rows):
    for number, (now, event, expected) in enumerate(rows):
        saver, actions = saver.on(event, float(now))
        assert list(actions) == expected, f"row {number}: {event}"


@pytest.mark.parametrize(
    ("events", "is_busy", "unsaved"),
    [
        ([], False, None),
        ([ask(5)], True, None),
        ([ask(5), OK], False, None),
        ([ask(5), FULL], True, 5),
        ([ask(5), FULL, ask(6)], True, None),
        ([ask(5), WriteFailed("full", is_final=True)], False, 5),
        ([ask(5), WriteFailed("full", is_final=True, is_invalid=True)], False, None),
        ([RecordWritten(9, 4), ask(5)], True, 5),
        ([ask(LOAD)], True, None),
        ([ask(5), DIED, DIED, DIED], True, 5),
        ([ask(5), FULL, FallbackRequested()], True, None),
    ],
)
def test_what_is_unsaved_is_known(events, is_busy, unsaved):
    saver = RUNNING
    for event in events:
        saver, _ = saver.on(event, 0.0)
    assert (saver.is_busy, saver.unsaved) == (is_busy, unsaved and save(unsaved))


def test_the_user_reads_what_was_not_saved_and_when_it_is_tried_again():
    assert report(5, 2).line == "the checkpoint of iteration 5 was not saved: full; trying again in 2 s"
    kept = FailureReport(fallback(5), "full").line
    assert kept == "the state after iteration 5 could not be kept elsewhere either: full"


class World:
    """A writer that takes one request at a time, may fail, stall or die, and checks what it is told to do.

    Attributes:
        has: request that the writer has.
        open: steps that were to be saved and are neither saved nor replaced.
        not_before: step and time before which its next attempt must not begin.
        on_file: last iteration whose record is on file; it stays behind while the record ``lags``.
    """

    def __init__(self):
        self.saver, self.now, self.is_alive, self.is_killed, self.has, self.since = PROCESS, 0.0, False, False, None, 0
        self.step, self.open, self.not_before, self.has_given_up = 0, set(), (0, 0.0), False
        self.lags, self.on_file = False, 0

    def on(self, event):
        self.saver, actions = self.saver.on(event, self.now)
        for action in actions:
            match action:
                case WriterAction.START:
                    assert not self.is_alive
                    self.is_alive, self.is_killed, self.ready, self.has_given_up = (
                        True,
                        False,
                        self.now + START_S,
                        False,
                    )
                case WriterAction.KILL:
                    assert self.is_alive
                    assert not self.is_killed
                    assert self.now > max(self.since, self.ready) + DEADLINE_S
                    self.is_killed = True
                case Write(request):
                    assert (self.is_alive, self.is_killed, self.has) == (True, False, None), "one request at a time"
                    self.has, self.since = request, self.now
                    assert request.kind != "save" or request.step in self.open
                    if request == save(self.not_before[0]):
                        assert self.now >= self.not_before[1], "a retry is never early"
                case FailureReport(request, reason):
                    pause_s = next((p for p in RETRY_PAUSES_S if reason.endswith(f"again in {p:g} s")), None)
                    if request.kind == "save" and pause_s is not None:
                        self.not_before = request.step, self.now + pause_s
                case WriterAction.GIVE_UP:
                    self.has_given_up = True
        self.check()

    def check(self):
        """Nothing that was to be saved is forgotten, and nothing is thought to be saved that is not."""
        saver = self.saver
        known = {r.step for r in (saver.current, *saver.waiting, saver.failed) if r is not None and r.is_write}
        assert self.open <= known
        if self.open and not saver.is_busy:
            assert saver.unsaved is not None
        if self.is_alive and not self.is_killed and saver.waiting and self.has is None:
            assert saver.waiting[0].step > self.on_file, "a writer that is free waits for a record alone"

    def act(self, what, seconds):
        self.now += seconds
        match what:
            case "save":
                self.step += 1
                if not self.lags:
                    self.on_file = self.step
                    self.on(RecordWritten(self.step, self.step))
                self.open = {self.step} | ({self.has.step} & self.open if self.has is not None else set())
                self.on(ask(self.step))
            case "load" | "reshard":
                self.not_before = self.not_before if what == "reshard" else (0, 0.0)
                self.on(ask(WriteRequest(what)))
            case "drain":
                self.not_before = 0, 0.0
                self.on(Draining())
            case "fallback":
                self.open = {max(self.open)} if self.open and self.has is None else self.open
                self.on(FallbackRequested())
            case "lag":
                self.lags = not self.lags
            case "succeed" | "fail" if self.has is not None:
                self.answer(is_written=what == "succeed")
            case "die" if self.is_alive:
                if self.has is not None and self.saver.waiting and self.saver.waiting[0].is_write:
                    self.open -= {self.has.step} - {self.saver.waiting[0].step}  # a newer save replaces it
                self.is_alive, self.has = False, None
                self.on(DIED)
        self.on(LATER)

    def answer(self, *, is_written):
        request, self.has, self.ready = self.has, None, self.now
        later = {other.kind for other in self.saver.waiting}
        if is_written and request.is_write:
            self.open.discard(request.step)
        elif request.kind == "fallback" or (request.kind == "save" and later & {"save", "load"}):
            self.open.discard(request.step)  # nothing more can be done, or another state counts
        self.on(OK if is_written else FULL)


KINDS = ["save", "save", "load", "reshard", "drain", "lag", "fallback", "succeed", "fail", "fail", "die", "wait"]
ACTS = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.0, 0.0, 1.6, 2.5, 11.0, 50.0]),
)


@settings(max_examples=400)
@given(st.lists(ACTS, max_size=40), st.sampled_from(["succeed", "fail", "die", "wait"]))
def test_whatever_happens_nothing_is_lost_and_every_run_ends(acts, last):
    """The writer succeeds, fails, dies or says nothing in the end; a run waits for it for a bounded time."""
    world = World()
    for what, seconds in acts:
        world.act(what, seconds)
        if world.has_given_up:
            break
    world.on_file = world.step
    world.on(RecordWritten(world.step, world.step))
    for _ in range(200):
        if not world.saver.is_busy or world.has_given_up:
            break
        world.act("die" if world.is_killed else last, 5.0)
    assert not world.saver.is_busy or world.has_given_up
    world.act("fallback", 0.0)
    assert world.saver.unsaved is None, "all that could be written has been tried or is being tried"
