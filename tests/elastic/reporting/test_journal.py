"""The journal of a run of processes, and its goodput: histories, reported to the membership that decides."""

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.deadlines import Deadlines
from swift.elastic.membership import (
    CutFound,
    CutRefused,
    Died,
    Formed,
    GoLive,
    Heartbeat,
    Kill,
    Loaded,
    Member,
    Membership,
    PhaseTimed,
    ProcessState,
    Ready,
    RecoveryPolicy,
    Stamp,
    Started,
    Tick,
    processes_of,
)
from swift.elastic.reporting.goodput import CAUSES, Goodput
from swift.elastic.reporting.journal import Journal
from swift.schedules.adapt import MoveRule
from swift.topology import Topology

LIMITS = Deadlines(start=10, forming=4, heartbeat=2, progress=6)
A, B, C, D = ALL = processes_of(Topology(2, 2))
"""Workers 0:0, 0:1, 1:0 and 1:1: A and C serve stage 0, B and D stage 1."""


class History:
    """A run that is told to a membership and a journal; it begins at second 100, and its time moves with ``at``."""

    def __init__(self, limits=LIMITS, policy=None):
        self.time, self.journal, self.membership = 100.0, Journal(100.0), Membership.of(ALL, limits, 100.0, policy)
        self.notes, self.commands = [], []

    def at(self, second):
        """Advances to this second of the run; nothing happens before."""
        assert second >= self.time - 100
        self.time = 100 + second
        return self

    def tell(self, event):
        before = self.membership
        self.membership, commands = before.on(event)
        self.notes += self.journal.on(event, before, self.membership, commands)
        self.commands += commands
        return self

    def of(self, make, process, *args):
        return self.tell(make(self.membership.statuses[process].member, *args)._replace(time=self.time))

    def tick(self):
        return self.tell(Tick(self.time))

    def start(self, *processes):
        for process in processes:
            incarnation = self.membership.statuses[process].member.incarnation + 1
            self.tell(Started(Member(process, incarnation), self.time))
            self.of(Ready, process, 0)
        return self.tick()

    def die(self, *processes, why="signal 9"):
        for process in processes:
            self.of(Died, process, 0, why)
        return self.tick()

    def form(self, held):
        """All members answer; they have states after these iterations of the generation that ran last."""
        for member in self.membership.generation.form.members:
            stamps = frozenset(Stamp(self.membership.last_live, step) for step in held)
            self.tell(Formed(member, self.membership.number, stamps, self.time))
        return self.tick()

    def enter(self, step, *processes):
        return self.beat(step, step - 1, *processes)

    def finish(self, step, *processes):
        return self.beat(step, step, *processes)

    def beat(self, entered, finished, *processes):
        for process in processes or [member.process for member in self.journal._running]:
            self.of(Heartbeat, process, self.membership.last_live, entered, finished, 0)
        return self.tick()

    def alive(self):
        for process in ALL:
            if self.membership.statuses[process].state is not ProcessState.DEAD:
                self.of(Heartbeat, process, 0, 0, 0, 0)
        return self.tick()

    def took(self, process, **parts):
        for part, seconds in parts.items():
            self.of(PhaseTimed, process, self.membership.number, part, seconds, 0)
        return self

    def now(self, *processes):
        return [self.membership.statuses[process].member for process in processes]

    def noted(self, event):
        return [note for note in self.notes if note.event == event]

    def texts(self):
        """The lines since the last time."""
        told, self.notes = [note.text for note in self.notes if note.text is not None], []
        return told

    def spent(self):
        """Seconds spent on each cause, without those that have cost nothing."""
        goodput = self.journal.goodput(self.time)
        assert goodput["total_s"] == sum(goodput[f"{cause}_s"] for cause in CAUSES) == self.time - 100
        return {cause: goodput[f"{cause}_s"] for cause in CAUSES if goodput[f"{cause}_s"]}


@pytest.fixture
def live():
    """Two seconds to start, then three iterations of a second each; all are in the fourth."""
    history = History().start(*ALL).at(2).form(held=()).enter(1)
    for step in (1, 2, 3):
        history.at(2 + step).finish(step).enter(step + 1)
    return history


def test_a_run_without_failures_is_useful_from_its_first_generation_on(live):
    assert live.texts() == ["forming generation 1 with 4 processes", "running with 4 processes"]
    assert live.at(5.5).spent() == {"startup": 2, "useful": 3.5}
    goodput = live.journal.goodput(105.5)
    assert goodput["goodput"] == 3.5 / 5.5
    assert goodput["recovery_median_s"] is None
    assert goodput["recovery_parts"] == {}


def recovering(live):
    """D is killed half a second into iteration 4, of which nobody has finished more than the third."""
    live.texts()
    live.notes += live.journal.kill_injected(D, 105.5)
    live.at(5.75).die(D)
    live.took(A, leave=0.25, link=0.125).took(B, leave=0.125, program=0.5).took(C, program=0.25)
    live.at(7).form(held={2, 3}).enter(4)
    live.took(A, state=0.25, first_step=1.5).at(8.75).finish(4, A, B)
    return live.at(9).finish(4, C)


def test_a_recovery_is_told_with_its_parts_once_all_have_finished_an_iteration(live):
    recovering(live)
    (death,), (recovery,) = live.noted("death"), live.noted("recovery")
    assert death.step == 3
    assert death.fields == {"process": "1:1", "incarnation": 0, "why": "signal 9", "detection_s": 0.25}
    assert recovery.step == 4
    assert recovery.fields == {
        "epoch": 2,
        "members": ["0:0", "0:1", "1:0"],
        "joined": [],
        "failed": ["1:1"],
        "after": 3,
        "rerun_steps": 0,
        "recovery_s": 3.5,
        "detection_s": 0.25,
        "agreement_s": 1.25 - 0.25 - 0.125 - 0.5,
        "leave_s": 0.25,
        "link_s": 0.125,
        "program_s": 0.5,
        "state_s": 0.25,
        "first_step_s": 1.5,
    }
    assert live.texts() == [
        "process 1:1 is killed on purpose",
        "process 1:1 died (signal 9); 3 of 4 continue",
        "resumed after iteration 3 with 3 processes: 3.50 s after the failure (detection 0.25, agreement 0.38, "
        "leave 0.25, link 0.12, program 0.50, state 0.25, first step 1.50)",
    ]


def test_the_time_of_a_recovery_is_that_until_its_first_iteration_but_for_a_usual_one(live):
    """Half an iteration was broken off; the next one took 1.75 s, of which 1 s is usual."""
    recovering(live)
    assert live.spent() == {
        "startup": 2,
        "useful": 3 + 1 + 0.25,
        "detection": 0.25,
        "reconfiguration": 1.25 + 0.75,
        "rerun": 0.5,
    }
    goodput = live.journal.goodput(live.time)
    assert [goodput[f"num_{what}"] for what in ("deaths", "recoveries", "joins")] == [1, 1, 0]
    assert goodput["recovery_median_s"] == goodput["recovery_max_s"] == 3.5
    assert goodput["recovery_parts"]["first_step"] == {"median_s": 1.5, "max_s": 1.5}


def test_parts_that_nobody_has_told_are_not_known(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4)
    (recovery,) = live.noted("recovery")
    assert [recovery.fields[f"{part}_s"] for part in ("leave", "first_step")] == [None, None]
    assert "leave" not in live.journal.goodput(live.time)["recovery_parts"]
    assert live.texts()[-1] == "resumed after iteration 3 with 3 processes: 1.00 s after the failure"


def test_iterations_that_somebody_had_finished_are_run_again(live):
    """A has finished 4 at 6, and goes back to 3 and on, a second each."""
    live.at(6).finish(4, A).enter(5, A).at(6.5).die(D)
    live.at(7).form(held={3}).enter(4).at(8).finish(4).enter(5).at(9).finish(5)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["rerun_steps"] == 1
    assert recovery.text.startswith("resumed after iteration 3 with 3 processes, 1 iteration again: 1.50 s")
    assert live.spent() == {"startup": 2, "useful": 3 + 1 + 1, "reconfiguration": 0.5, "rerun": 0.5 + 1}
    assert live.journal.goodput(live.time)["rerun_steps"] == 1


@pytest.mark.parametrize("heard_from", ["record", "late record", "late beat"])
def test_what_a_death_seemed_to_break_off_may_be_finished(live, heard_from):
    """The second from 5 on was of use, and iteration 4 is the one that is run again."""
    if heard_from == "record":
        live.journal.record(4)
    live.at(6).die(D)
    if heard_from == "late beat":
        live.finish(4, A)
    if heard_from == "late record":
        live.journal.record(4)
    live.at(7).form(held={3}).enter(4).at(8).finish(4)
    assert live.noted("recovery")[0].fields["rerun_steps"] == 1
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "reconfiguration": 1, "rerun": 1}
    live.at(9).die(C)
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "reconfiguration": 1, "rerun": 2}, "5 is broken off"


def test_who_is_not_heard_has_failed_when_it_was_last_heard(live):
    live.at(6).beat(4, 3, A, B, C).at(7.5).tick()
    assert live.texts()[-1] == "process 1:1 is killed: sent no heartbeat for 2 s"
    live.at(7.75).die(D).at(8).form(held={3}).enter(4).at(9).finish(4)
    (death,), (recovery,) = live.noted("death"), live.noted("recovery")
    assert death.fields["detection_s"] == 2.5
    assert {name: recovery.fields[name] for name in ("recovery_s", "detection_s", "agreement_s")} == {
        "recovery_s": 4,
        "detection_s": 2.5,
        "agreement_s": 0.5,
    }
    assert live.spent() == {"startup": 2, "useful": 3 + 1, "detection": 2.5, "reconfiguration": 0.5}


def test_who_is_stuck_has_failed_when_something_last_went_on(live):
    for second in (6.5, 8, 9.5, 11, 11.5):
        live.at(second).beat(4, 3, A, B, C).beat(3, 3, D)
    live.die(D)
    assert live.noted("kill")[0].fields["why"] == "is still in iteration 3, others are in 4"
    assert live.noted("death")[0].fields["detection_s"] == 6.5
    assert live.spent() == {"startup": 2, "useful": 3, "detection": 6.5}


def test_several_deaths_are_one_recovery_from_the_first_on(live):
    live.texts()
    live.die(D).at(5.25).die(C).at(6).form(held={3}).enter(4).at(7).finish(4, A)
    assert live.noted("recovery") == []
    live.finish(4, B)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["failed"] == ["1:1", "1:0"]
    assert recovery.fields["recovery_s"] == 2
    assert live.texts() == [
        "process 1:1 died (signal 9); 3 of 4 continue",
        "process 1:0 died (signal 9); 2 of 4 continue",
        "resumed after iteration 3 with 2 processes: 2.00 s after the first of 2 failures (agreement 1.00)",
    ]
    assert live.journal.goodput(live.time)["num_deaths"] == 2


def test_a_death_in_the_first_iteration_after_another_belongs_to_the_same_recovery(live):
    live.die(D).at(6).form(held={3}).enter(4).at(6.5).die(C).at(7).form(held={3}).enter(4).at(8).finish(4)
    (recovery,) = live.noted("recovery")
    assert recovery.fields["epoch"] == 3
    assert recovery.fields["recovery_s"] == 3
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 2}


def test_time_in_which_two_failures_are_undetected_counts_once(live):
    live.at(5.5).beat(4, 3, A, C).at(6).beat(4, 3, A).at(6.5).beat(4, 3, A).at(8).tick()
    assert [note.fields["process"] for note in live.noted("kill")] == ["0:1", "1:0", "1:1"]
    live.die(B, C)
    assert [note.fields["detection_s"] for note in live.noted("death")] == [3, 2.5]
    assert live.spent() == {"startup": 2, "useful": 3, "detection": 3}


def test_who_comes_back_is_admitted_and_costs_what_it_takes_after_the_last_iteration(live):
    recovering(live)
    live.enter(5).texts()
    live.at(9.25).start(D)
    assert live.texts() == ["process 1:1 has rejoined, admitted after iteration 6"]
    live.at(9.75).finish(5, A, B, C).at(10.75).finish(6, A, B, C)
    live.took(D, link=0.5).at(12).form(held={5, 6}).enter(7).at(13.25).finish(7)
    (join,) = live.noted("join")
    assert {name: join.fields[name] for name in ("epoch", "joined", "after", "join_s", "link_s", "rerun_steps")} == {
        "epoch": 3,
        "joined": ["1:1"],
        "after": 6,
        "join_s": 4,
        "link_s": 0.5,
        "rerun_steps": 0,
    }
    assert live.texts() == [
        "resumed after iteration 6 with 4 processes: 4.00 s after process 1:1 was admitted (agreement 2.25, link 0.50)"
    ]
    assert live.spent()["reconfiguration"] == 2 + 1.25 + 0.25
    assert live.journal.goodput(live.time)["num_joins"] == 1
    assert live.journal.goodput(live.time)["num_recoveries"] == 1


@pytest.fixture
def moving():
    """The fixture ``live`` of a run whose blocks may move: D is down, and C is to take over the fourth block."""
    history = History(policy=RecoveryPolicy(move_rule=MoveRule(is_always=True)))
    history.start(*ALL).at(2).form(held=()).enter(1).at(3).finish(1).enter(2)
    history.die(D).at(4).form(held={1}).enter(2).at(5).finish(2).enter(3).texts()
    cut = (0, 0, 0, 1), (0, 0, 0, 0)
    history.tell(CutFound(history.time, frozenset({D.worker}), cut, 0.2, 1e6)).tick()
    for process in (A, B, C):
        history.of(Loaded, process, history.membership.number, 0)
    return history.tick()


def test_who_takes_over_blocks_is_told_and_costs_what_it_takes_after_the_last_iteration(moving):
    moving.at(6).finish(3).at(7).finish(4).at(8).form(held={3, 4}).enter(5).at(9.5).finish(5)
    (move,) = moving.noted("move")
    assert {name: move.fields[name] for name in ("epoch", "joined", "cuts", "after", "move_s", "rerun_steps")} == {
        "epoch": 3,
        "joined": [],
        "cuts": [[3, 1], [4, 0]],
        "after": 4,
        "move_s": 4.5,
        "rerun_steps": 0,
    }
    assert moving.texts() == [
        "blocks moved among the survivors, stages of 3, 1; 4, 0 layers: resumed after iteration 4 with 3 processes: "
        "4.50 s after the decision (agreement 3.00)"
    ]
    goodput = moving.journal.goodput(moving.time)
    assert (goodput["num_moves"], goodput["num_joins"], goodput["num_recoveries"]) == (1, 0, 1)
    assert moving.spent()["reconfiguration"] == 1 + 1 + 0.5


def test_a_death_in_the_midst_of_a_move_makes_it_a_recovery(moving):
    moving.at(6).finish(3).at(6.5).die(C).at(7).form(held={3}).enter(4).at(8).finish(4)
    assert moving.noted("move") == []
    (recovery,) = [note for note in moving.noted("recovery") if note.fields["epoch"] == 4]
    assert recovery.fields["failed"] == ["1:0"]
    assert moving.journal.goodput(moving.time)["num_moves"] == 0


def test_a_move_in_which_a_process_cannot_take_part_is_told_in_a_sentence(moving):
    moving.at(6).finish(3).at(6.5).of(CutRefused, C, 3, "the plan is missing", 0).tick()
    moving.at(7).form(held={3}).enter(4).at(8).finish(4)
    assert moving.noted("move") == []
    (refused,) = moving.noted("move_refused")
    assert refused.fields == {"process": "1:0", "epoch": 3, "why": "the plan is missing"}
    assert refused.text == (
        "process 1:0 cannot move blocks: the plan is missing; blocks stay where they are until the run is resumed"
    )


def test_a_move_that_is_given_up_is_no_move(moving):
    """No member leaves its iteration: all go on with the cuts of the run."""
    moving.at(12).alive()
    assert moving.membership.generation.form[1:] == (tuple(moving.now(A, B, C)), None, ())
    moving.form(held={2}).enter(3).at(13).finish(3)
    assert moving.noted("move") == moving.noted("join") == []


def test_joiners_do_not_hide_a_recovery_whose_first_iteration_still_runs(live):
    live.die(D).at(6).form(held={3}).start(D).enter(4)
    assert live.membership.generation.form.after == 5
    live.at(7).finish(4, A, B, C)
    assert [note.fields["recovery_s"] for note in live.noted("recovery")] == [2]
    live.at(8).finish(5, A, B, C).at(9).form(held={5}).enter(6).at(10).finish(6)
    assert [note.fields["join_s"] for note in live.noted("join")] == [4]


def test_a_death_while_joiners_are_taken_in_makes_it_a_recovery(live):
    live.die(D).at(6).form(held={3}).enter(4).at(7).finish(4).enter(5).start(D)
    live.at(8).finish(5, A).at(8.5).die(C).at(9).form(held={4}).enter(5).at(10).finish(5)
    assert live.noted("join") == []
    recovery = live.noted("recovery")[-1]
    assert [recovery.fields[name] for name in ("joined", "recovery_s", "rerun_steps")] == [["1:1"], 1.5, 1]
    assert [note.text for note in live.noted("form")][2:] == [
        "process 1:1 has rejoined, admitted after iteration 6",
        None,
    ]


def test_a_death_after_the_last_iteration_before_joiners_breaks_nothing_off(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4).enter(5).start(D)
    live.at(7).finish(5).at(8).finish(6, A, B, C).at(10).die(C)
    assert live.spent() == {"startup": 2, "useful": 6, "reconfiguration": 2}


def test_an_iteration_to_which_joiners_were_promised_in_vain_is_broken_off(live):
    live.die(D).form(held={3}).enter(4).at(6).finish(4).enter(5).start(D)
    for second in (7.5, 9, 10.5, 12, 12.5):
        live.at(second).alive()
    assert live.membership.generation.form.after is None
    live.at(13).form(held={4}).enter(5).at(14).finish(5)
    assert live.spent() == {"startup": 2, "useful": 5, "reconfiguration": 0.5, "rerun": 6.5}
    assert [note.fields["join_s"] for note in live.noted("join")] == [8]


def test_a_member_that_cannot_go_on_is_a_failure_too(live):
    live.of(Ready, A, 0, 1).tick().at(6).form(held={3}).enter(4).at(7).finish(4)
    assert "process 0:0 is alive, but cannot continue in generation 1" in live.texts()
    goodput = live.journal.goodput(live.time)
    assert [goodput[f"num_{what}"] for what in ("deaths", "recoveries")] == [0, 1]


def test_a_stage_without_a_process_is_waited_for(live):
    live.texts()
    live.die(B).at(6).die(D)
    assert live.texts() == [
        "process 0:1 died (signal 9); 3 of 4 continue",
        "process 1:1 died (signal 9)",
        "stage 1 has no process left: the others wait",
    ]
    live.at(8).alive().at(9).start(D)
    assert live.texts() == ["process 1:1 has rejoined"]
    live.at(10).form(held={3}).enter(4).at(11).finish(4)
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 2, "waiting": 3}
    assert live.noted("recovery")[0].fields["recovery_s"] == 6


def test_all_who_are_started_again_are_one_line_and_one_recovery(live):
    live.texts()
    for second in (6.5, 8, 9.5, 11):
        live.at(second).alive()
    live.at(11.5).alive()
    live.at(12).form(held={3}).enter(4)  # a new generation, which does not help
    live.texts()
    for second in (13.5, 15, 16.5, 18):
        live.at(second).alive()
    live.at(18.5).alive()
    live.die(*ALL)
    assert live.texts() == [
        "all processes are restarted: no process finished an iteration for 6 s, and all are in 4",
        "stages 0 and 1 have no process left: the others wait",
    ]
    live.start(*ALL)
    assert live.texts() == ["processes 0:0, 0:1, 1:0 and 1:1 have rejoined"]
    live.at(19.5).form(held={3}).enter(4).at(20.5).finish(4)
    assert live.noted("recovery")[0].fields["detection_s"] == 6.5
    # The iteration that the new generation broke off had taken 6.5 s by then.
    assert live.spent() == {"startup": 2, "useful": 4, "rerun": 6.5, "detection": 6.5, "reconfiguration": 1.5}


def test_where_an_generation_starts_from_a_checkpoint_is_heard_from_its_members(live):
    """Beats without an iteration say nothing yet; 2 and 3 are run again."""
    live.die(D).at(6).form(held=()).beat(0, 0).texts()
    live.enter(2).at(7).finish(2).enter(3).at(8).finish(3).at(9).finish(4)
    (recovery,) = live.noted("recovery")
    assert [recovery.fields[name] for name in ("after", "rerun_steps", "recovery_s")] == [1, 2, 2]
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 1, "rerun": 2}
    assert live.journal.goodput(live.time)["rerun_steps"] == 2


def test_windows_of_iterations_count_as_many(live):
    """The usual iteration takes a second; a window of four takes five, from the second to the last run again."""
    for step in (7, 11, 15, 19):
        live.at(step + 2).finish(step).beat(step + 4, step)
    live.at(22).die(D).form(held={17}).beat(21, 17).at(27).finish(21)
    assert live.spent() == {"startup": 2, "useful": 3 + 16 + 2, "rerun": 1 + 2, "reconfiguration": 1}
    assert live.journal.goodput(live.time)["rerun_steps"] == 2


def test_the_step_of_a_note_goes_back_with_the_run_and_old_beats_do_not_count(live):
    live.at(6).finish(4).die(D).at(7).form(held={3})
    assert live.noted("epoch")[-1].step == 3
    live.enter(4, A).tell(Heartbeat(live.membership.statuses[A].member, 1, 9, 9, live.time)).at(7.5)
    assert live.spent() == {"startup": 2, "useful": 4, "reconfiguration": 1.5}, "the first iteration is not done"
    live.die(C)
    assert live.noted("death")[-1].step == 3


def test_an_iteration_of_which_only_the_state_tells_is_not_run_again(live):
    live.die(D).form(held={4}).enter(5).at(6).finish(5)
    assert live.noted("recovery")[0].fields["rerun_steps"] == 0


def test_what_is_told_twice_or_too_late_is_noted_once(live):
    live.of(Ready, A, 0, 1).tick().of(Ready, B, 0, 1).tick()
    assert len(live.noted("cannot_go_on")) == 1
    live.die(D).die(D)
    assert live.journal.goodput(live.time)["num_deaths"] == len(live.noted("death")) == 1


def test_who_cannot_go_on_before_the_first_generation_has_gone_is_no_failure():
    history = History().start(*ALL)
    history.of(Ready, A, 0, 1).tick().at(2).form(held=()).enter(1).at(3).finish(1)
    assert history.noted("cannot_go_on") == history.noted("recovery") == []
    assert history.spent() == {"startup": 2, "useful": 1}


def test_a_later_death_is_not_that_of_the_kill_before(live):
    live.journal.kill_injected(D, 105)
    live.at(5.5).die(D).form(held={3}).enter(4).start(D).at(6).finish(4, A, B, C).at(7).finish(5, A, B, C)
    live.form(held={5}).enter(6).at(9).die(D)
    assert [note.fields["detection_s"] for note in live.noted("death")] == [0.5, 0]
    live.form(held={5}).enter(6).at(10).finish(6)
    assert live.noted("join") == []
    assert [note.fields["recovery_s"] for note in live.noted("recovery")] == [1, 1]


def test_a_process_that_dies_before_it_is_a_member_costs_nothing(live):
    live.die(D).at(6).form(held={3}).enter(4).at(7).finish(4).texts()
    live.tell(Started(Member(D, 1), live.time)).at(8).die(D, why="exit code 1")
    assert live.texts() == ["process 1:1 died (exit code 1) before it was ready"]
    assert live.spent() == {"startup": 2, "useful": 5, "reconfiguration": 1}


def test_a_line_left_in_the_pipe_of_a_dead_process_is_not_told(live):
    live.die(D).texts()
    live.of(Heartbeat, D, 1, 4, 3, 0)
    assert isinstance(live.commands[-1], Kill)
    assert live.texts() == []


def test_who_is_given_up_is_noted_and_the_error_says_it_to_people(live):
    live.die(D).texts()
    for incarnation in (1, 2, 3):
        live.tell(Started(Member(D, incarnation), live.time)).die(D, why="exit code 1")
    (note,) = live.noted("give_up")
    assert note.fields == {"process": "1:1", "why": "died 3 times in a row before it was live: exit code 1"}
    assert note.text is None


def test_who_is_left_out_after_failing_at_its_start_is_told():
    history = History(policy=RecoveryPolicy("restart")).start(*ALL[:3])
    for incarnation in (1, 2, 3):
        history.tell(Started(Member(D, incarnation), history.time)).die(D, why="exit code 1")
    (note,) = history.noted("left_out")
    why = "died 3 times in a row before it had finished an iteration: exit code 1"
    assert note.fields == {"process": "1:1", "why": why}
    assert note.text == f"process 1:1 {why}: the run continues without it"


def test_where_one_fails_at_its_start_and_all_are_restarted_nobody_is_said_to_continue():
    history = History(policy=RecoveryPolicy("restart")).start(*ALL).form(held=())
    history.texts()
    history.die(D, why="exit code 1").at(1.1).tick()
    assert history.texts() == ["process 1:1 died (exit code 1)", "all processes are restarted: 1:1 died"]


def test_news_that_were_heard_before_what_was_seen_meanwhile_take_no_time():
    goodput = Goodput(0)
    goodput.go_live(0, 2)
    goodput.finish(1, 3)
    goodput.finish(2, 2.5)
    goodput.fail(2, 2.25, 2.75)
    goodput.go_live(1, 2.875)
    goodput.finish(2, 4)
    assert {cause: s for cause, s in goodput.seconds(3).items() if s} == {
        "startup": 2,
        "useful": 1,
        "reconfiguration": 0.5,
        "rerun": 0.5,
    }


def test_time_between_a_death_and_the_want_of_a_stage_is_not_waited():
    goodput = Goodput(0)
    goodput.go_live(0, 2)
    goodput.fail(2, 2, 2)
    goodput.wait(3)
    assert {cause: s for cause, s in goodput.seconds(7).items() if s} == {
        "startup": 2,
        "reconfiguration": 1,
        "waiting": 4,
    }


class Drill(History):
    """Processes that obey at once or late, and die; it counts by itself what is run again."""

    def __init__(self, seed):
        super().__init__(replace(LIMITS, max_quick_deaths=1000))
        self.random, self.kept, self.newest, self.rerun_steps = Random(seed), {}, 0, 0
        self.start(*ALL)

    def running(self):
        return [
            m.process
            for m in self.journal._running
            if self.membership.statuses[m.process].last_live == self.membership.last_live
        ]

    def act(self, action, who, seconds):
        self.time += seconds
        process, generation = ALL[who], self.membership.generation
        state = self.membership.statuses[process].state
        match action:
            case "kill" if state is not ProcessState.DEAD:
                self.journal.kill_injected(process, self.time - seconds / 2)
                self.die(process)
            case "start" if state is ProcessState.DEAD:
                self.start(process)
            case "cannot go on" if generation is not None and generation.is_live:
                self.of(Ready, process, 0, generation.form.number)
            case "form" if generation is not None and not generation.is_live:
                self.form_all(generation)
            case "run" if generation is not None and (generation.is_live or generation.form.after is not None):
                self.run(process, generation)
        self.reap()

    def form_all(self, generation):
        for member in generation.not_formed:
            self.tell(Formed(member, generation.form.number, self.kept.get(member.process, frozenset()), self.time))
        self.tick()

    def tell(self, event):
        had = len(self.commands)
        super().tell(event)
        for command in self.commands[had:]:
            if isinstance(command, GoLive):
                stamp = command.stamp or Stamp(command.number, 0)
                self.first = stamp.step
                self.kept = {member.process: frozenset({stamp}) for member in self.membership.generation.form.members}
        return self

    def run(self, process, generation):
        """One process finishes its next iteration, for which the others are not more than one behind."""
        status = self.membership.statuses[process]
        if process not in self.running() or status.state is ProcessState.DEAD:
            return
        step = max(stamp.step for stamp in self.kept[process]) + 1
        if generation.form.after is not None and not generation.is_live and step > generation.form.after:
            return
        if any(max(s.step for s in self.kept[other]) < step - 1 for other in self.running()):
            return
        if step > self.first:
            self.rerun_steps += step <= self.newest
            self.first = step
            self.newest = max(self.newest, step)
        self.enter(step, process).finish(step, process)
        kept = {stamp for stamp in self.kept[process] if stamp.step == step - 1}
        self.kept[process] = frozenset(kept | {Stamp(self.membership.last_live, step)})

    def reap(self):
        """Processes that are to be killed die, and those that live are heard."""
        for process in ALL:
            if self.membership.statuses[process].is_dying:
                self.die(process)
        for process in ALL:
            if self.random.random() < 0.9 and self.membership.statuses[process].state is not ProcessState.DEAD:
                self.of(Heartbeat, process, 0, 0, 0, 0)
        self.tick()


ACTIONS = ["run"] * 12 + ["form"] * 4 + ["start"] * 3 + ["kill", "cannot go on"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 150))
def test_in_any_history_every_second_is_counted_once_and_every_iteration_that_is_run_again(seed, length):
    drill, random = Drill(seed), Random(seed)
    for _ in range(length):
        drill.act(random.choice(ACTIONS), random.randrange(4), random.choice([0, 0.1, 0.3, 0.7, 1.3]))
        goodput = drill.journal.goodput(drill.time)
        spent = [goodput[f"{cause}_s"] for cause in CAUSES]
        assert min(spent) >= 0
        assert goodput["total_s"] == sum(spent)
        assert goodput["total_s"] == pytest.approx(drill.time - 100)
        assert goodput["rerun_steps"] == drill.rerun_steps
    for note in drill.notes:
        assert not {"time", "event", "step"} & note.fields.keys()
        assert json.loads(json.dumps(note.fields)) == note.fields
        assert note.text is None or "\n" not in note.text
    deaths, recoveries = drill.noted("death"), drill.noted("recovery")
    assert goodput["num_deaths"] == len(deaths)
    assert goodput["num_recoveries"] == len(recoveries)
    for note in recoveries:
        fields = note.fields
        assert fields["recovery_s"] >= fields["detection_s"] + fields["agreement_s"] - 1e-3
        assert note.step > fields["after"]
