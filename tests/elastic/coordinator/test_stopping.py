"""A run that is told to stop: what it waits for, for how long, and what it says; without processes."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from swift.elastic.membership.messages import Member, StateId
from swift.elastic.transport.messages import WORKER_MESSAGES, SnapshotMissed
from swift.errors import RunError
from tests.elastic.coordinator.acted_runs import PROCESSES, STEP_S, Run


def test_the_last_iteration_is_saved_whole_however_long_it_takes(monkeypatch):
    run = Run(monkeypatch, turns=200).stops_after(5)
    (halt,) = run.stage.halts
    assert run.kept.asked == [halt.after, halt.after]
    assert run.kept.newest == run.told.written == halt.after
    assert run.told.texts[-2:] == [
        f"stopping: waiting for iteration {halt.after}, which is to be the last",
        "stopping: waiting for the checkpoint",
    ]


def test_all_have_a_second_to_hear_which_iteration_is_the_last(monkeypatch):
    (halt,) = Run(monkeypatch).stops_after(5).stage.halts
    assert halt.after >= 5 + 1 / STEP_S


def runs_until_started_again(run, process):
    """Kills a process after five iterations, and asks the run to stop once it is started again."""

    def is_started():
        if run.told.written >= 5 and Member(process, 0) in run.stage.there:
            run.stage.kill(Member(process, 0))
        return Member(process, 1) in run.stage.there

    with run.supervisor:
        run.supervisor.run(is_started)


def test_who_starts_again_is_told_how_far_the_run_is(monkeypatch):
    run, (killed, _) = Run(monkeypatch), PROCESSES
    runs_until_started_again(run, killed)
    assert run.stage.begun[Member(killed, 0)] == 0
    assert 5 <= run.stage.begun[Member(killed, 1)] <= run.told.written


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_where_all_are_restarted_the_process_that_follows_each_is_held_ready_once_all_run(monkeypatch, recovery):
    run = Run(monkeypatch, recovery=recovery)

    def hold(who, *_):
        assert not run.supervisor._driver.membership.is_recovering, "the processes that run need the cores"
        run.stage.held.add(who)

    run.stage.hold = hold
    run.stops_after(5)
    assert run.stage.held == ({Member(process, 1) for process in PROCESSES} if recovery == "restart" else set())


MISSED = "--chaos 'step 3: kill 0:0' waited until the run ended, and did not happen: "


@pytest.mark.parametrize(
    ("chaos", "reason"),
    [
        ((), f"{MISSED}the programs for it were not compiled by then"),
        (("step 2: kill 1:0", "step 90: restart 1:0"), f"{MISSED}no process would have been left in its stage"),
    ],
)
def test_a_fault_that_waited_to_the_end_is_told_of(monkeypatch, chaos, reason):
    run = Run(monkeypatch, chaos=["step 3: kill 0:0 once compiled", *chaos])
    run.stops_after(5, meanwhile=lambda: run.told.texts.append("the end"))
    texts = [text for text in run.told.texts if "--chaos" in text or text == "the end"]
    assert texts == ["the end", reason]


def test_a_record_that_fails_while_its_save_waits_ends_the_run(monkeypatch):
    """The last save of a run waits for a record that nobody else will be told cannot be written."""
    run = Run(monkeypatch, turns=10**9)
    run.told.has_failed = True
    with run.supervisor, pytest.raises(RunError, match="the record of the run cannot be written"):
        run.supervisor.run()


def test_it_waits_no_longer_than_it_was_told_to(monkeypatch):
    run = Run(monkeypatch, saved=3, turns=10**9, stopping=0.5)
    with pytest.raises(RunError) as caught:
        run.stops_after(5)
    (halt,) = run.stage.halts
    assert str(caught.value) == (
        "has not stopped within 0.5 s, and waited for the checkpoint: stopped without saving iteration "
        f"{halt.after}; resume from the checkpoint of iteration 3 with --resume"
    )


def test_a_stop_that_cannot_keep_the_last_iteration_is_none_in_order(monkeypatch):
    run = Run(monkeypatch, saved=3)

    def is_full():
        for member in run.stage.there.values():
            member.has_room = False

    with pytest.raises(RunError, match=r"cannot be saved: [01]:0 cannot keep its part: .* of iteration 3 with --res"):
        run.stops_after(5, meanwhile=is_full)
    assert run.kept.asked == []


def test_an_older_state_that_could_not_be_kept_does_not_matter_in_the_end(monkeypatch):
    run = Run(monkeypatch)
    member = Member(PROCESSES[0], 0)
    line = WORKER_MESSAGES.line_of(SnapshotMissed, stamp=StateId(1, 4), reason="full")
    run.stops_after(5, meanwhile=lambda: run.supervisor._driver.take_from_worker(line, member, 0.0))
    assert run.kept.newest == run.told.written


def test_where_saving_fails_half_of_the_time_is_for_keeping_the_state_elsewhere(monkeypatch):
    run, begun = Run(monkeypatch, turns=10**9, stopping=4.0), time.monotonic()
    run.kept.unsaved = 9
    run.stops_after(5)
    assert 2 <= time.monotonic() - begun < 4


def test_a_directory_that_is_another_s_is_not_tidied_up(monkeypatch):
    def is_lost():
        raise RunError("no longer belongs to this process")

    run = Run(monkeypatch)
    run.kept.unsaved, run.told.check = 9, is_lost
    assert run.supervisor.keep_unsaved() is None


def test_one_slow_iteration_does_not_make_the_time_to_hear_shorter(monkeypatch):
    run = Run(monkeypatch)

    def slow(step_s):
        for member in run.stage.there.values():
            member.step_s = step_s

    def has_waited():
        slow(60.0)
        run.supervisor._turn()

    (halt,) = run.stops_after(5, meanwhile=has_waited).stage.halts
    assert halt.after >= 5 + 1 / STEP_S


def test_directories_whose_file_system_does_not_respond_keep_nobody_waiting(monkeypatch):
    looks, answers = threading.Event(), threading.Event()

    def mend():
        looks.set()
        return answers.wait(60)

    run = Run(monkeypatch, mend=mend).stops_after(5, meanwhile=lambda: looks.wait(60))
    assert not answers.is_set()
    assert run.kept.newest == run.told.written
    answers.set()


def test_directories_that_were_removed_are_told_of_once(monkeypatch):
    looks = []
    run = Run(monkeypatch, mend=lambda: looks.append(1) or len(looks) < 4)
    with run.supervisor:
        run.supervisor.run(lambda: len(looks) > 4 and run.told.written >= 5)
    assert run.told.texts[0] == "the run's temporary directories were removed; they are made again"
    assert [text for text in run.told.texts if "directories" in text] == run.told.texts[:1]


def test_there_is_nothing_to_wait_for_where_all_is_saved(monkeypatch):
    run = Run(monkeypatch, saved=10**6).stops_after(5)
    assert (run.stage.halts, run.kept.asked, run.told.texts) == ([], [], [])


def test_before_the_first_iteration_it_stops_at_once(monkeypatch):
    run = Run(monkeypatch).stops_after(0)
    assert (run.stage.halts, run.told.texts) == ([], [])


def test_who_imports_yet_is_killed_and_the_others_are_asked_to_end(monkeypatch):
    """It would read that it is to end after seconds of imports, which the machine may not leave to the run."""
    run, (ready, imports) = Run(monkeypatch), [Member(process, 0) for process in PROCESSES]
    start, killed, asked = run.stage.start, [], []

    def start_slowly(who, *words):
        start(who, *words)
        if who == imports:
            run.stage.there[who].said.clear()

    run.stage.start = start_slowly
    run.stage.signal = lambda *words: killed.append(words)
    run.stage.wait_for = asked.extend
    with run.supervisor:
        run.supervisor.run(lambda: ready in run.stage and not run.stage.there[ready].said)
    assert (killed, asked) == ([(imports, signal.SIGKILL)], [ready, imports])


def test_who_is_starting_is_not_waited_for(monkeypatch):
    """It is ready at once, and would end the generation of the others to join them."""
    run, victim = Run(monkeypatch), PROCESSES[1]
    runs_until_started_again(run, victim)
    assert [halt.number for halt in run.stage.halts] == [2]
    assert run.kept.newest == run.told.written


def all_die(run, kept=()):
    """Kills all members; the next incarnation of the first finds what it has kept in memory."""
    first, start = PROCESSES[0], run.stage.start

    def start_with_states(who, *words):
        start(who, *words)
        if who.process == first:
            run.stage.there[who].held = set(kept)

    def kill():
        run.stage.start = start_with_states
        for member in list(run.stage.there):
            run.stage.kill(member)

    return kill


def test_a_stage_whose_last_process_kept_its_state_is_waited_for(monkeypatch):
    """Such a process could not leave a collective in time, and ended itself."""
    run = Run(monkeypatch, saved=3)
    run.stops_after(5, meanwhile=all_die(run, [StateId(1, 5)]))
    assert run.kept.newest == run.told.written >= 5
    assert any("waiting for all processes to run after a failure" in text for text in run.told.texts)


@pytest.mark.parametrize("saved", [None, 3])
def test_a_stage_whose_state_is_gone_is_not_trained_again(monkeypatch, saved):
    run = Run(monkeypatch, saved=saved)
    run.stops_after(5, meanwhile=all_die(run))
    assert (run.stage.halts, run.kept.newest) == ([], saved)


def test_a_stage_that_does_not_come_back_is_waited_for_no_longer_than_allowed(monkeypatch):
    run = Run(monkeypatch, saved=3, turns=10**9, stopping=0.5)
    kill = all_die(run)

    def kill_for_long():
        kill()
        run.stage.start = lambda who, *_: run.stage.there.update(
            {who: SimpleNamespace(said=[], act=lambda: None, obey=lambda _: None)}
        )

    run.stops_after(5, meanwhile=kill_for_long)
    assert run.kept.newest == 3


def test_who_dies_meanwhile_costs_the_others_nothing(monkeypatch):
    run = Run(monkeypatch)
    victim = Member(PROCESSES[1], 0)
    run.stops_after(5, meanwhile=lambda: run.stage.kill(victim))
    numbers = [halt.number for halt in run.stage.halts]
    assert numbers[-1] > 1, "those who are left are in a generation of their own, and are told again"
    assert run.kept.newest == run.told.written
    assert [who for who in run.stage.there if who.process == PROCESSES[1]] == [], "nobody is started for nothing"
