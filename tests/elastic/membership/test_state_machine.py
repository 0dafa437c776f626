"""The membership of real processes: each rule by an example."""

from dataclasses import replace

import pytest

from swift.deadlines import Deadlines
from swift.elastic.membership import (
    CheckpointsListed,
    CutFound,
    CutRefused,
    Departed,
    Died,
    Done,
    Enter,
    FaultInjected,
    Form,
    Formed,
    GiveUp,
    GoLive,
    Heartbeat,
    Kill,
    LoadAhead,
    Loaded,
    MayRestart,
    Member,
    Membership,
    PhaseTimed,
    ProcessState,
    Ready,
    RecoveryPolicy,
    ReshardState,
    RestartAll,
    Restored,
    RestoreFailed,
    RestoreState,
    Retire,
    ShardLayout,
    StageLost,
    Stamp,
    Started,
    StartGeneration,
    StartProcess,
    StopRequested,
    StopRun,
    Tick,
    Woke,
    processes_of,
)
from swift.elastic.membership.lifecycle import restarted
from swift.errors import SettingError
from swift.schedules.adapt import MoveRule, Outages
from swift.topology import Topology

LIMITS = Deadlines(start=10, forming=4, heartbeat=2, progress=6, dying=5)
A, B, C, D = processes_of(Topology(2, 2))
"""Workers 0:0, 0:1, 1:0 and 1:1: A and C serve stage 0, B and D stage 1."""


class Script:
    """A membership that is told events; the time is that of the last ``wait``."""

    def __init__(self, processes=(A, B, C, D), limits=LIMITS, **policy):
        self.time, self.membership = 0.0, Membership.of(processes, limits, 0.0, RecoveryPolicy(**policy))

    def tell(self, make, process, *args, incarnation=None):
        """Tells an event of a process, which then has the newest incarnation unless told."""
        newest = self.membership.statuses[process].member.incarnation
        member = Member(process, newest if incarnation is None else incarnation)
        event = make(member, *args)._replace(time=self.time)
        self.membership, commands = self.membership.on(event)
        return commands

    def start(self, *processes):
        for process in processes:
            self.tell(Started, process, 0, incarnation=self.membership.statuses[process].member.incarnation + 1)

    def ready(self, *processes):
        for process in processes:
            self.tell(Ready, process, 0)

    def die(self, *processes):
        return [command for process in processes for command in self.tell(Died, process, 0, "killed")]

    def formed(self, held_by, of=None):
        """Reports members that hold states after these iterations, of the generation that ran last unless given."""
        generation = self.membership.last_live if of is None else of
        self.left(*held_by)
        for process, held in held_by.items():
            self.tell(Formed, process, self.membership.number, frozenset(Stamp(generation, step) for step in held), 0)

    def left(self, *processes):
        """The commands that came of it."""
        return [command for process in processes for command in self.tell(Departed, process, self.membership.number, 0)]

    def beat(self, entered_by):
        """Every member has ended the iteration before the one that it is in."""
        for process, entered in entered_by.items():
            self.tell(Heartbeat, process, self.membership.last_live, entered, entered - 1, 0)

    def tick(self, after=0.0):
        self.time += after
        self.membership, commands = self.membership.on(Tick(self.time))
        return list(commands)

    def now(self, *processes):
        return tuple(self.membership.statuses[process].member for process in processes)

    def alive(self):
        """All that have not died send heartbeats, without being in an iteration of this generation."""
        for process, status in self.membership.statuses.items():
            if status.state is not ProcessState.DEAD:
                self.tell(Heartbeat, process, 0, 0, 0, 0)


@pytest.fixture
def live():
    """A run whose first generation is live, with everybody in iteration 5."""
    return script_live()


def script_live(processes=(A, B, C, D), **policy):
    script = Script(processes, **policy)
    script.start(*processes)
    script.ready(*processes)
    script.tick()
    script.formed(dict.fromkeys(processes, ()))
    script.tick()
    script.beat(dict.fromkeys(processes, 5))
    assert {status.state for status in script.membership.statuses.values()} == {ProcessState.LIVE}
    return script


def test_the_first_generation_waits_until_everybody_is_ready_and_everybody_has_formed():
    script = Script()
    script.start(A, B, C, D)
    script.ready(A, B, C)
    assert script.tick(1) == []
    script.ready(D)
    assert script.tick() == [Form(1, script.now(A, B, C, D))]
    script.formed({A: (), B: (), C: ()})
    assert script.tick() == []
    script.formed({D: ()})
    assert script.tick() == [GoLive(1, None)]
    assert script.tick() == []


def test_who_is_not_ready_in_time_is_killed_and_the_first_generation_forms_without_it():
    script = Script()
    script.start(A, B, C, D)
    script.time = 9.5
    script.ready(A, B, C)
    assert script.tick() == []
    assert script.tick(1) == [Kill(*script.now(D), "was not ready 10 s after its start")]
    assert script.tick() == []
    script.die(D)
    assert script.tick() == [Form(1, script.now(A, B, C))]


def test_a_run_that_never_has_somebody_for_a_stage_says_so():
    script = Script()
    script.start(A, C)
    script.time = 9.5
    script.ready(A, C)
    assert script.tick(1) == [StageLost((1,))]
    assert script.tick() == []


def test_a_death_makes_an_generation_of_the_others_that_goes_on_where_all_of_them_can(live):
    live.die(D)
    assert live.tick() == [Form(2, live.now(A, B, C))]
    live.formed({A: {4, 5}, B: {3, 4}, C: {3, 4}})
    assert live.tick() == [GoLive(2, Stamp(1, 4), live.now(A, B, C))]


def test_two_deaths_at_once_are_one_generation(live):
    live.die(A, D)
    assert live.tick() == [Form(2, live.now(B, C))]
    assert live.tick() == []


def test_a_death_while_forming_makes_a_newer_generation_and_answers_to_the_older_are_not_counted(live):
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    live.die(C)
    assert live.tick() == [Form(3, live.now(A, B))]
    live.tell(Formed, A, 2, frozenset({Stamp(1, 4)}), 0)
    live.formed({B: {4}})
    assert live.tick() == []
    live.formed({A: {4}})
    assert live.tick() == [GoLive(3, Stamp(1, 4), live.now(A, B))]


def test_survivors_that_hold_no_common_iteration_go_back_to_the_checkpoint(live):
    live.die(D)
    live.tick()
    live.formed({A: {4, 5}, B: {2, 3}, C: {4, 5}})
    assert live.tick() == [GoLive(2, None)]


def test_who_does_not_form_in_time_is_killed_and_left_out_once_it_is_dead(live):
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    for _ in range(3):
        live.alive()
        live.tick(1.5)
    live.alive()
    assert live.membership.statuses[C].is_dying
    assert live.tick() == []
    live.die(C)
    assert live.tick() == [Form(3, live.now(A, B))]


def test_who_has_met_the_others_is_given_time_to_compile(live):
    live.die(D)
    live.tick()
    live.tell(PhaseTimed, A, 2, "link", 0.1, 0)
    live.formed({B: {4}, C: {4}})
    for _ in range(3):
        live.alive()
        assert live.tick(1.5) == []
    for _ in range(2):
        live.alive()
        live.tick(1.5)
    assert [process for process, status in live.membership.statuses.items() if status.is_dying] == [A]


def test_joiners_are_admitted_together_after_the_iteration_that_nobody_has_entered_yet(live):
    live.die(C, D)
    live.tick()
    live.formed({A: {4}, B: {4}})
    live.tick()
    live.start(C, D)
    live.ready(C, D)
    assert live.tick() == [], "nobody is known to run yet"
    live.beat({A: 7, B: 6})
    assert live.tick() == [Form(3, live.now(A, B, C, D), after=8)]
    live.formed({A: {7, 8}, B: {7, 8}, C: (), D: ()})
    assert live.tick() == [GoLive(3, Stamp(2, 8), live.now(A, B))]


def joining(script):
    """D has died and come back, and all others are in iteration 8 while they are told to end it."""
    script.die(D)
    script.tick()
    script.formed({A: {4}, B: {4}, C: {4}})
    script.tick()
    script.start(D)
    script.ready(D)
    script.beat({A: 8, B: 8, C: 8})
    assert script.tick() == [Form(3, script.now(A, B, C, D), after=9)]


def test_a_death_while_somebody_joins_makes_an_generation_of_all_who_are_ready(live):
    joining(live)
    live.die(A)
    assert live.tick() == [Form(4, live.now(B, C, D))]
    live.formed({B: {7, 8}, C: {7, 8}, D: ()})
    assert live.tick() == [GoLive(4, Stamp(2, 8), live.now(B, C))]


def test_a_joiner_that_dies_costs_an_generation_but_no_iteration(live):
    joining(live)
    live.die(D)
    assert live.tick() == [Form(4, live.now(A, B, C))]


def test_members_that_never_end_the_iteration_before_a_join_are_told_to_abort(live):
    joining(live)
    for _ in range(4):
        live.alive()
        assert live.tick(1.5) == []
    live.alive()
    assert live.tick(0.5) == [Form(4, live.now(A, B, C, D))]


def test_a_member_that_cannot_go_on_though_all_live_gets_a_new_generation_of_the_same(live):
    live.tell(Ready, A, 0, 1)
    assert live.tick() == [Form(2, live.now(A, B, C, D))]
    live.tell(Ready, B, 0, 1)
    assert live.tick() == [], "it did not know yet of the newer one"


def test_a_member_that_cannot_go_on_before_a_join_does_not_keep_the_others_waiting(live):
    joining(live)
    live.tell(Ready, A, 0, 2)
    assert live.tick() == [Form(4, live.now(A, B, C, D))]


def test_a_thawed_process_is_killed_when_it_speaks(live):
    old = live.now(D)[0].incarnation
    for _ in range(2):
        live.beat({A: 6, B: 6, C: 6})
        live.tick(1.1)
    assert live.membership.statuses[D].is_dying
    assert live.tell(Heartbeat, D, 1, 6, 5, 0) == ()
    live.die(D)
    assert [kill.member for kill in live.tell(Heartbeat, D, 1, 6, 5, 0)] == [Member(D, old)]
    live.start(D)
    assert [kill.member for kill in live.tell(Ready, D, 0, incarnation=old)] == [Member(D, old)]
    assert live.membership.statuses[D].state is ProcessState.STARTING


def test_the_others_go_on_without_a_process_that_cannot_be_killed(live):
    (kill,) = wait_until_silent(live, C)
    assert kill.member.process == C
    live.time += LIMITS.dying
    live.alive()
    assert live.tick() == []
    (retire,) = live.tick(0.1)
    assert retire == Retire(kill.member, "was killed, and has not died in 5 s")
    (form,) = live.tick()
    assert C not in {process for process, _ in form.members}
    assert live.membership.statuses[C].state is ProcessState.RETIRED
    assert live.membership.unserved_stages or C not in {process for process, _ in live.membership.present()}


def wait_until_silent(script, process):
    """Commands when all but one are heard."""
    script.time += LIMITS.heartbeat + 0.1
    for other in {A, B, C, D} - {process}:
        script.beat({other: 5})
    return script.tick()


def test_what_a_retired_process_says_changes_nothing_nor_does_its_death(live):
    wait_until_silent(live, C)
    live.time += LIMITS.dying + 0.1
    live.alive()
    live.tick()
    before = live.membership
    assert [type(one) for one in live.tell(Heartbeat, C, 1, 9, 8, 0)] == [Kill]
    assert [type(one) for one in live.tell(Ready, C, 0)] == [Kill]
    assert live.die(C) == []
    assert live.membership == before
    _, (restart,) = restarted(live.membership, "a test", live.time)
    assert not restarted(live.membership, "a test", live.time)[0].statuses[C].is_dying, restart


def test_who_is_killed_again_has_no_longer_to_die(live):
    wait_until_silent(live, C)
    live.membership, _ = restarted(live.membership, "a test", live.time + 4)
    live.time += LIMITS.dying + 0.1
    assert [command.member.process for command in live.tick() if isinstance(command, Retire)] == [C]


def test_a_stuck_process_whose_heart_beats_is_found_by_its_progress(live):
    for _ in range(5):
        live.beat({A: 6, B: 6, C: 6, D: 5})
        live.tick(1.5)
    assert [process for process, status in live.membership.statuses.items() if status.is_dying] == [D]
    live.die(D)
    assert live.tick() == [Form(2, live.now(A, B, C))]


def stuck(script):
    """All have begun an iteration that nobody ends: a generation of the same members is to show who hangs."""
    for _ in range(4):
        script.beat(dict.fromkeys([A, B, C, D], 5))
        assert script.tick(1.5) == []
    script.alive()
    assert script.tick(0.5) == [Form(2, script.now(A, B, C, D))]


def test_who_hangs_with_all_others_is_found_since_it_does_not_leave(live):
    stuck(live)
    live.left(A, B, C)
    for _ in range(3):
        live.alive()
        assert live.tick(1.2) == []
    live.alive()
    assert [kill.member for kill in live.tick(1.2)] == list(live.now(D))
    live.die(D)
    assert live.tick() == [Form(3, live.now(A, B, C))]
    live.formed({A: {4, 5}, B: {4, 5}, C: {4, 5}})
    assert live.tick() == [GoLive(3, Stamp(1, 5), live.now(A, B, C))]


def test_all_are_restarted_where_a_new_generation_does_not_help_and_may_find_their_state_again(live):
    stuck(live)
    live.formed({process: {4, 5} for process in (A, B, C, D)}, of=1)
    assert live.tick() == [GoLive(2, Stamp(1, 5), live.now(A, B, C, D))]
    for _ in range(4):
        live.beat(dict.fromkeys([A, B, C, D], 6))
        assert live.tick(1.5) == []
    live.alive()
    assert live.tick(0.5) == [RestartAll("no process finished an iteration for 6 s, and all are in 6")]
    live.die(A, B, C)
    assert live.tick() == []
    live.die(D)
    assert live.tick() == [StageLost((0, 1))]
    live.start(A, B, C, D)
    live.ready(A, B)
    assert live.tick() == [], "the others are still starting"
    live.ready(C, D)
    assert live.tick() == [Form(3, live.now(A, B, C, D))]
    live.formed({process: {4, 5} for process in (A, B, C, D)}, of=1)
    assert live.tick() == [GoLive(3, Stamp(1, 5), live.now(A, B, C, D))]


def test_all_enter_once_the_last_has_left(live):
    live.die(D)
    live.tick()
    assert live.left(A, C) == []
    assert live.left(A) == [], "once more"
    assert live.left(B) == [Enter(2, live.now(A, B, C))]


def test_members_that_wait_for_something_else_are_excused(live):
    for _ in range(9):
        live.alive()
        live.membership = live.membership.with_clock_reset(live.time)
        assert live.tick(1.5) == []


def test_who_is_ended_with_all_others_is_not_given_up(live):
    for _ in range(4):
        live.membership, commands = restarted(live.membership, "because", live.time)
        assert commands == (RestartAll("because"),)
        assert live.die(A, B, C, D) == []
        live.start(A, B, C, D)


def test_a_lost_stage_is_waited_for_and_its_state_is_lost(live):
    live.die(B)
    live.tick()
    live.die(D)
    assert live.tick() == [StageLost((1,))]
    assert live.membership.unserved_stages
    live.start(D)
    assert live.tick() == []
    live.ready(D)
    assert live.tick() == [Form(3, live.now(A, C, D))]
    live.formed({A: {4, 5}, C: {4, 5}})
    live.formed({D: {4, 5}}, of=0)
    assert live.tick() == [GoLive(3, None)], "what a restarted process holds is of an older time"


def test_a_killed_stage_that_finds_its_state_again_goes_on_from_it(live):
    live.die(B, D)
    live.tick()
    live.start(B, D)
    live.ready(B, D)
    assert live.tick() == [Form(2, live.now(A, B, C, D))]
    live.formed({A: {4, 5}, B: {3, 4}, C: {4, 5}, D: ()})
    assert live.tick() == [GoLive(2, Stamp(1, 4), live.now(A, B, C))]


def test_the_newest_state_is_that_of_the_newest_generation_that_every_stage_has(live):
    live.die(D)
    live.tick()
    live.formed({A: {6}}, of=1)
    live.formed({B: {5}, C: {5}}, of=1)
    assert live.tick() == [GoLive(2, Stamp(1, 5), live.now(B, C))], "C has it for stage 0; A copies"


def test_a_worker_of_several_processes_is_there_when_all_of_them_are():
    processes = processes_of(Topology(1, 1, 3), by_rank=True)
    script = Script(processes)
    script.start(*processes)
    script.ready(*processes)
    script.tick()
    script.formed(dict.fromkeys(processes, ()))
    script.tick()
    script.die(processes[1])
    assert script.tick() == [StageLost((0,))]
    script.start(processes[1])
    script.ready(processes[1])
    assert script.tick() == [Form(2, script.now(*processes))]
    script.formed({processes[0]: {4}, processes[1]: (), processes[2]: {4}})
    assert script.tick() == [GoLive(2, None)]


def test_a_process_that_dies_three_times_before_it_is_live_is_given_up(live):
    assert live.die(D) == [], "it was live"
    for quick_deaths in (1, 2, 3):
        live.start(D)
        commands = live.die(D)
        assert len(commands) == (quick_deaths == 3)
    assert commands == [GiveUp(D, "died 3 times in a row before it was live: killed")]


def test_a_process_that_dies_with_its_node_is_not_given_up_for_it(live):
    live.die(D)
    for _ in range(5):
        live.start(D)
        assert not live.tell(Died, D, 0, "node 1 is gone", False)


def test_deadlines_have_to_be_times():
    with pytest.raises(SettingError, match=r"Deadlines\.heartbeat = 0: must be a number above 0"):
        replace(LIMITS, heartbeat=0)


RANKS = processes_of(Topology(1, 1, 4), by_rank=True)


@pytest.fixture
def elastic():
    """The same of an elastic run of four ranks."""
    script = Script(RANKS, is_elastic=True)
    script.start(*RANKS)
    script.ready(*RANKS)
    script.tick()
    script.formed(dict.fromkeys(RANKS, ()))
    assert script.tick() == [GoLive(1, None)]
    script.beat(dict.fromkeys(RANKS, 5))
    return script


def find(script, *found):
    """The first of those who have formed knows of slices elsewhere: process, generation, iteration."""
    generation = script.membership.generation
    script.membership = replace(
        script.membership,
        generation=replace(generation, found=frozenset((process, Stamp(of, step)) for process, of, step in found)),
    )


def test_the_ranks_that_are_there_go_on_at_once(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    assert elastic.tick() == [Form(2, elastic.now(r0, r1, r3))]
    elastic.formed({r0: {4, 5}, r1: {4, 5}, r3: {3, 4}})
    find(elastic, (r2, 1, 4), (r2, 1, 3))
    assert elastic.tick() == [GoLive(2, Stamp(1, 4), elastic.now(r0, r1, r3), ShardLayout(RANKS, (1,)))]


def test_a_state_with_all_slices_is_preferred_to_a_newer_one(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    elastic.tick()
    elastic.formed({r0: {4, 5}, r1: {4, 5}, r3: {4, 5}})
    find(elastic, (r2, 1, 4))
    (go,) = elastic.tick()
    assert (go.stamp, go.is_whole) == (Stamp(1, 4), True)


def test_where_slices_are_lost_all_go_on_from_the_newest_state_that_most_have(elastic):
    r0, r1, _, r3 = RANKS
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({r0: {4, 5}, r1: {3, 4}, r3: {4, 5}})
    assert elastic.tick() == [GoLive(2, Stamp(1, 4), elastic.now(r0, r1, r3), ShardLayout(RANKS, (1,)), is_whole=False)]


def shrunk(script):
    """The second rank is lost, and the others are in iteration 8 on a state that was cut for them."""
    r0, r1, r2, r3 = RANKS
    script.die(r1)
    script.tick()
    script.formed({r0: {4, 5}, r2: {4, 5}, r3: {4, 5}})
    script.tick()
    script.beat({r0: 8, r2: 8, r3: 8})
    return r0, r2, r3


def test_who_comes_back_makes_the_ranks_more_again(elastic):
    others = shrunk(elastic)
    elastic.start(RANKS[1])
    elastic.ready(RANKS[1])
    assert elastic.tick() == [Form(3, elastic.now(*RANKS), after=9)]
    elastic.formed({process: {8, 9} for process in others}, of=2)
    elastic.formed({RANKS[1]: {4}}, of=1)  # it has found an old state
    assert elastic.tick() == [GoLive(3, Stamp(2, 9), elastic.now(*others), ShardLayout(others, (2,)))]


def test_the_same_ranks_go_on_with_what_they_have_and_the_cut_stays_that_of_older_copies(elastic):
    others = shrunk(elastic)
    elastic.tell(Ready, others[0], 0, 2)
    assert elastic.tick() == [Form(3, elastic.now(*others))]
    elastic.formed({process: {6, 7} for process in others}, of=2)
    assert elastic.tick() == [GoLive(3, Stamp(2, 7), elastic.now(*others))]
    elastic.die(others[0])
    elastic.tick()
    elastic.formed({process: {8} for process in others[1:]}, of=3)
    (go,) = elastic.tick()
    assert (go.layout, go.is_whole) == (ShardLayout(others, (2, 3)), False)


def test_who_has_lost_everything_though_nobody_is_less_has_its_slices_cut_anew(elastic):
    elastic.die(RANKS[2])
    elastic.start(RANKS[2])
    elastic.ready(RANKS[2])
    assert elastic.tick() == [Form(2, elastic.now(*RANKS))]
    elastic.formed({process: {4} for process in RANKS if process != RANKS[2]})
    elastic.formed({RANKS[2]: ()})
    find(elastic, (RANKS[2], 1, 4))
    (go,) = elastic.tick()
    assert (go.stamp, go.layout) == (Stamp(1, 4), ShardLayout(RANKS, (1,)))


def test_what_is_lost_before_the_first_iteration_is_made_again(elastic):
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({process: {0} for process in RANKS if process != RANKS[2]})
    assert elastic.tick() == [GoLive(2, None)]


def test_the_last_rank_goes_on_alone_and_without_it_the_stage_is_lost(elastic):
    elastic.die(*RANKS[1:])
    assert elastic.tick() == [Form(2, elastic.now(RANKS[0]))]
    elastic.formed({RANKS[0]: {5}})
    elastic.tick()
    elastic.die(RANKS[0])
    assert elastic.tick() == [StageLost((0,))]


def test_an_old_state_that_is_there_by_chance_is_not_gone_back_to(elastic):
    others = shrunk(elastic)
    elastic.die(others[0])
    elastic.start(others[0])
    elastic.ready(others[0])
    elastic.tick()
    elastic.formed({others[0]: {4}}, of=2)
    elastic.formed({process: {7, 8} for process in others[1:]}, of=2)
    find(elastic, *((process, 2, 4) for process in others))
    (go,) = elastic.tick()
    assert (go.stamp, go.is_whole) == (Stamp(2, 8), False)


def test_where_only_some_have_taken_up_a_state_that_was_cut_anew_that_before_is_as_good(elastic):
    """The first has; the others have not, and one of them dies with all that it had of the new one."""
    r0, r1, r2, r3 = RANKS
    elastic.die(r1)
    elastic.tick()
    elastic.formed({process: {4} for process in (r0, r2, r3)})
    elastic.tick()
    elastic.die(r2)
    assert elastic.tick() == [Form(3, elastic.now(r0, r3))]
    elastic.formed({r0: {4}}, of=2)
    elastic.formed({r3: {4}}, of=1)
    find(elastic, (r0, 1, 4), (r1, 1, 4), (r2, 1, 4), (r3, 2, 4))
    assert elastic.tick() == [GoLive(3, Stamp(1, 4), elastic.now(r3), ShardLayout(RANKS, (1,)))]


def after_go(script, **stored):
    """Commands that follow where these checkpoints exist as the newest generation goes live."""
    script.membership, commands = script.membership.on(CheckpointsListed(script.time, **stored))
    return list(commands)


def survivors(script):
    """D has died, and the others go live with what they have of iteration 30."""
    script.die(D)
    script.tick()
    script.formed({A: {30}, B: {30}, C: {30}})
    (go,) = script.tick()
    return go


def test_members_run_from_their_own_state_and_only_once(live):
    go = survivors(live)
    assert after_go(live, newest=20, is_full=True, written=29) == [StartGeneration(go, 29)]
    assert after_go(live, newest=40, is_full=True, written=29) == []


@pytest.mark.parametrize(("newest", "is_full", "loads"), [(40, True, True), (40, False, False), (30, True, False)])
def test_a_checkpoint_is_preferred_to_states_where_it_is_newer_and_nothing_is_lost(live, newest, is_full, loads):
    go = survivors(live)
    wanted = RestoreState(2) if loads else StartGeneration(go)
    assert after_go(live, newest=newest, is_full=is_full) == [wanted]


def test_members_wait_for_a_checkpoint_as_long_as_it_takes_and_run_from_it(live):
    survivors(live)
    assert after_go(live, newest=40, is_full=True) == [RestoreState(2)]
    for _ in range(9):
        live.alive()
        assert live.tick(1.5) == []
    assert live.membership.on(Restored(Stamp(1, 40), live.time)) == (live.membership, ()), "it was for an older one"
    live.membership, commands = live.membership.on(Restored(Stamp(2, 40), live.time, 30))
    assert commands == (StartGeneration(GoLive(2, Stamp(2, 40)), 30, is_restored=True),)


def test_a_checkpoint_that_cannot_be_read_ends_the_run_that_waits_for_it(live):
    survivors(live)
    after_go(live, newest=40, is_full=True)
    assert live.membership.on(RestoreFailed(1, live.time, "lost"))[1] == ()
    assert live.membership.on(RestoreFailed(2, live.time, "lost", "see there"))[1] == (StopRun("lost", "see there"),)


@pytest.mark.parametrize(
    ("stored", "command"),
    [
        ({"written": 9}, StopRun),
        ({"written": 9, "is_busy": True}, RestoreState),
        ({"newest": 5, "written": 9}, RestoreState),
        ({"newest": 5}, StartGeneration),
    ],
)
def test_a_lost_state_comes_from_a_checkpoint_or_ends_the_run_and_at_the_beginning_none_is_lost(live, stored, command):
    live.die(D)
    live.tick()
    live.formed({A: {4, 5}, B: {2, 3}, C: {4, 5}})
    live.tick()
    assert [type(one) for one in after_go(live, **stored)] == [command]


def test_ranks_that_are_fewer_run_from_a_state_that_is_resharded_for_them(elastic):
    r0, r1, r2, r3 = RANKS
    elastic.die(r2)
    elastic.tick()
    elastic.formed({r0: {4}, r1: {4}, r3: {4}})
    (go,) = elastic.tick()
    assert after_go(elastic) == [ReshardState(2, Stamp(1, 4), ShardLayout(RANKS, (1,)))]
    elastic.membership, commands = elastic.membership.on(Restored(Stamp(2, 4), elastic.time))
    assert commands == (StartGeneration(GoLive(2, Stamp(2, 4), go.holders), is_restored=True),)


def test_where_slices_are_lost_a_newer_checkpoint_is_preferred_though_it_has_not_all_experts_either(elastic):
    r0, r1, _, r3 = RANKS
    elastic.die(RANKS[2])
    elastic.tick()
    elastic.formed({r0: {4}, r1: {4}, r3: {4}})
    elastic.tick()
    assert after_go(elastic, newest=5) == [RestoreState(2)]


def may_restart(script, **chance):
    return list(script.membership.on(MayRestart(script.time, **chance))[1])


def running(script):
    """All but D run, and have finished an iteration since it died."""
    go = survivors(script)
    after_go(script)
    script.beat(dict.fromkeys([A, B, C], 32))
    return go


def test_a_dead_process_is_started_again_once_the_others_run(live):
    survivors(live)
    assert may_restart(live) == [], "the others need the cores"
    after_go(live)
    assert may_restart(live) == []
    live.beat(dict.fromkeys([A, B, C], 32))
    assert may_restart(live) == [StartProcess(D)]
    assert may_restart(live, held_down=frozenset({D})) == []
    assert may_restart(live, away={D: 1.0}) == []


def test_a_process_is_not_started_more_often_than_was_said_unless_it_is_harmed_on_purpose(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy(max_restarts=1))
    for _ in range(3):
        live.membership, _ = live.membership.on(FaultInjected(*live.now(D), live.time))
        live.die(D)
        live.start(D)
        live.ready(D)
    live.die(D)
    live.start(D)
    live.ready(D)
    running(live)
    assert may_restart(live) == []


def test_a_run_ends_where_a_stage_has_nobody_who_may_be_started_again(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy(max_restarts=0))
    live.die(B, D)
    live.tick()
    assert may_restart(live) == [StopRun("stage 1 has no process left that may be restarted")]


def test_a_stage_whose_node_stays_away_ends_the_run_and_no_sooner(live):
    live.die(B, D)
    live.tick()
    assert may_restart(live, away={B: 9.0, D: 11.0}) == []
    why = "stage 1 has no process left that may be restarted (or whose node has returned)"
    assert may_restart(live, away={B: 11.0, D: 11.0}) == [StopRun(why)]


def test_a_process_that_is_held_down_is_started_where_its_stage_has_no_other(live):
    live.die(B, D)
    live.tick()
    assert may_restart(live, held_down=frozenset({D})) == [StartProcess(B)]
    assert may_restart(live, held_down=frozenset({B, D})) == [StartProcess(B), StartProcess(D)]


def test_all_are_restarted_after_a_death_where_that_was_asked_for(live):
    live.membership = replace(live.membership, policy=RecoveryPolicy("restart"))
    assert live.die(D) == [RestartAll("1:1 died")]
    assert live.die(A, B, C) == [], "they were killed with it"


def once(**policy):
    """A run whose processes join one generation each, of which the first has lost D and all have been killed."""
    script = script_live(recovery="restart", joins_once=True, **policy)
    assert script.die(D) == [RestartAll("1:1 died")]
    script.die(A, B, C)
    script.tick()
    return script


def test_where_processes_join_once_all_are_restarted_for_those_that_return():
    script = once()
    script.start(A, B, C)
    script.ready(A, B, C)
    assert script.tick() == [Form(2, script.now(A, B, C))]
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    assert script.tick() == [GoLive(2, Stamp(1, 4), script.now(A, B, C))]
    script.beat(dict.fromkeys([A, B, C], 6))
    script.start(D)
    assert script.tick() == []
    script.ready(D)
    before = script.membership
    script.tell(Done, A, 2, 0)
    assert script.tick() == [], "a member has nothing left to do"
    script.membership = before
    assert script.tick() == [RestartAll("1:1 can rejoin")]
    script.die(A, B, C, D)
    script.tick()
    script.start(A, B, C, D)
    script.ready(A, B, C, D)
    assert script.tick() == [Form(3, script.now(A, B, C, D))]


def test_where_processes_join_once_nobody_is_restarted_for_another_before_there_are_copies():
    script = once(copy_every=2)
    script.start(A, B, C)
    script.ready(A, B, C)
    script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    after_go(script)
    script.start(D)
    script.ready(D)
    for process, finished in [(A, 8), (B, 8), (C, 5), (C, 7)]:
        script.tell(Heartbeat, process, 2, finished + 1, finished, 0)
        assert script.tick() == [], "a copy may not be complete"
    script.tell(Heartbeat, C, 2, 9, 8, 0)
    assert script.tick() == [RestartAll("1:1 can rejoin")]


def test_where_processes_join_once_all_are_restarted_if_one_could_not_continue_or_none_does():
    script = script_live(recovery="restart", joins_once=True)
    script.tell(Ready, B, 0, 1)
    assert script.tick() == [RestartAll("a process could not continue")]
    script = script_live(recovery="restart", joins_once=True)
    for _ in range(4):
        script.beat(dict.fromkeys([A, B, C, D], 6))
        assert script.tick(1.5) == []
    script.alive()
    assert script.tick(0.5) == [RestartAll("no process finished an iteration for 6 s, and all are in 6")]


@pytest.mark.parametrize("policy", [{}, {"recovery": "restart", "joins_once": True}])
def test_a_run_that_is_to_stop_admits_nobody_and_still_recovers(policy):
    script = once() if policy else script_live()
    if not policy:
        script.die(D)
        assert script.tick() == [Form(2, script.now(A, B, C))]
    else:
        script.start(A, B, C)
        script.ready(A, B, C)
        script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    script.start(D)
    script.membership, commands = script.membership.on(StopRequested(script.time))
    assert commands == ()
    script.ready(D)
    script.beat(dict.fromkeys([A, B, C], 6))
    assert script.tick() == []
    expected = [RestartAll("0:0 died")] if policy else []
    assert script.die(A) == expected
    assert script.tick() == ([] if policy else [Form(3, script.now(B, C))])


def test_a_run_that_is_to_stop_admits_who_is_the_last_of_a_stage():
    """Without it the run could not end: nobody has its part of the state."""
    script = script_live()
    script.die(D)
    script.tick()
    script.formed({process: {4} for process in (A, B, C)}, of=1)
    script.tick()
    script.membership, _ = script.membership.on(StopRequested(script.time))
    script.start(D)
    script.ready(D)
    script.die(B)
    assert script.tick() == [StageLost((1,))]
    assert script.tick() == [Form(3, script.now(A, C, D))]


def test_a_run_that_is_to_stop_admits_no_part_of_a_worker():
    """One of a worker's two processes has died and is back."""
    processes = processes_of(Topology(2, 1, 2), by_rank=True)
    script = script_live(processes)
    script.membership, _ = script.membership.on(StopRequested(script.time))
    script.die(processes[3])
    assert script.tick() == [Form(2, script.now(*processes[:2]))]
    script.start(processes[3])
    script.ready(processes[3])
    script.tell(Ready, processes[0], 0, 2)
    assert script.tick() == [Form(3, script.now(*processes[:2]))]


def test_blocks_do_not_move_in_a_run_that_is_to_stop():
    script = lost()
    script.membership, _ = script.membership.on(StopRequested(script.time))
    assert found(script) == []


def test_where_all_are_needed_a_generation_waits_for_them_and_the_run_ends_without_one():
    script = once(needs_all=True)
    script.start(A, B, C)
    script.ready(A, B, C)
    assert StageLost not in map(type, script.tick())
    assert may_restart(script, held_down=frozenset({D})) == [StartProcess(D)]
    assert may_restart(script, away={D: 9.0}) == []
    why = "stage 1 has no process left that may be restarted (or whose node has returned)"
    assert may_restart(script, away={D: 11.0}) == [StopRun(why)]
    script.start(D)
    script.ready(D)
    assert script.tick() == [Form(2, script.now(A, B, C, D))]


def test_nothing_is_decided_until_a_supervisor_that_slept_has_heard_all(live):
    live.time += 60.0
    live.membership, _ = live.membership.on(Woke(live.time))
    assert live.tick(1.9) == []
    assert [type(one) for one in live.tick(0.1)] == [Kill] * 4


def test_a_generation_whose_members_have_done_all_they_were_to_do_has_no_deadline(live):
    for process in (A, B, C, D):
        live.tell(Done, process, 1, 0)
    assert live.membership.is_done
    for _ in range(9):
        live.alive()
        assert live.tick(1.5) == []


APART = (0, 0, 1), (0, 1, 1)
"""Pipelines that are cut differently: A has the first two of three chunks, B the last, C the first, D the last two."""


def test_where_pipelines_are_cut_differently_those_who_have_every_chunk_go_on():
    live = script_live(stage_of_chunk=APART)
    live.die(B, C)
    assert live.tick() == [Form(2, live.now(A, D))]
    live.formed({A: {4, 5}, D: {4}})
    assert live.tick() == [GoLive(2, Stamp(1, 4), live.now(A, D))]


def test_a_chunk_that_nobody_has_is_waited_for_though_each_stage_has_a_worker():
    live = script_live(stage_of_chunk=APART)
    live.die(A, D)
    assert live.tick() == [StageLost((0, 1))]
    assert live.membership.lost_without([A, D]) == (0, 1)
    assert live.membership.lost_without([A]) == live.membership.lost_without([B, C]) == ()
    live.start(A)
    live.ready(A)
    assert live.tick() == [Form(2, live.now(A, B, C))]


def test_a_state_is_gone_on_with_only_if_workers_that_have_every_chunk_hold_it():
    live = script_live(stage_of_chunk=APART)
    live.die(D)
    live.tick()
    live.formed({A: {4}, B: {4, 5}, C: {4, 5}})
    assert live.tick() == [GoLive(2, Stamp(1, 4), live.now(A, B, C))]


MOVED = (0, 0, 0, 0), (0, 0, 1, 1)
"""With B down, A takes over all four blocks of its pipeline."""
B_DOWN = frozenset({B.worker})
ALWAYS = MoveRule(is_always=True)


def lost(rule=ALWAYS):
    """A run that goes on without B, everybody in iteration 7."""
    script = script_live(move_rule=rule)
    script.die(B)
    assert script.tick() == [Form(2, script.now(A, C, D))]
    script.formed({A: (4, 5), C: (4, 5), D: (4, 5)})
    assert [type(command) for command in script.tick()] == [GoLive]
    script.beat({A: 7, C: 7, D: 7})
    return script


def found(script, failed=B_DOWN, gain=0.5, most_bytes=1e9):
    """A cut is prepared, and loaded by all that are told to; the commands that come of it at once, and then."""
    script.membership, commands = script.membership.on(CutFound(script.time, failed, MOVED, gain, most_bytes))
    assert commands == ()
    commands = script.tick()
    for command in commands:
        if isinstance(command, LoadAhead):
            assert command == LoadAhead(script.membership.number, script.membership.generation.form.members, MOVED)
            for process, _ in command.members:
                assert script.tick() == []
                script.tell(Loaded, process, command.number, 0)
            return script.tick()
    return commands


def test_survivors_take_over_blocks_in_a_planned_change_and_once():
    script = lost()
    assert found(script) == [Form(3, script.now(A, C, D), 8, MOVED)]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    assert script.tick() == [GoLive(3, Stamp(2, 8), script.now(A, C, D))]
    script.beat({A: 10, C: 10, D: 10})
    assert found(script) == []


def test_blocks_move_once_the_last_process_has_the_programs_however_long_it_takes():
    script = lost()
    script.membership, _ = script.membership.on(CutFound(script.time, B_DOWN, MOVED, 0.5, 1e9))
    assert script.tick() == [LoadAhead(2, script.now(A, C, D), MOVED)]
    for process in (A, C):
        script.tell(Loaded, process, 2, 0)
    for iteration in range(8, 8 + 2 * LIMITS.progress):
        assert script.tick(1.0) == []
        script.beat(dict.fromkeys((A, C, D), iteration))
    script.tell(Loaded, D, 2, 0)
    form = Form(3, script.now(A, C, D), iteration + 1, MOVED)
    assert form.stays_connected
    assert script.tick() == [form]


def test_programs_are_loaded_anew_once_another_process_has_died_meanwhile():
    script = lost()
    script.membership, _ = script.membership.on(CutFound(script.time, B_DOWN, MOVED, 0.5, 1e9))
    script.tick()
    script.die(C)
    assert script.tick() == [Form(3, script.now(A, D))]
    script.tell(Loaded, A, 2, 0)  # sent before it had heard of the death
    script.formed({A: (6, 7), D: (6, 7)})
    script.tick()
    script.beat({A: 9, D: 9})
    assert script.tick() == []
    moved = Form(4, script.now(A, D), 10, MOVED)
    assert found(script, B_DOWN | {C.worker}) == [moved]


def test_a_process_that_does_not_know_the_cut_as_it_is_to_load_it_goes_on_and_no_blocks_move():
    script = lost()
    script.membership, _ = script.membership.on(CutFound(script.time, B_DOWN, MOVED, 0.5, 1e9))
    script.tick()
    script.tell(Loaded, A, 2, 0)
    script.tell(CutRefused, C, 2, "another plan", 0)
    script.tell(Loaded, D, 2, 0)
    assert script.tick() == []
    assert script.membership.statuses[C].state is ProcessState.LIVE
    assert found(script) == []


def test_who_does_not_know_the_cut_is_in_the_next_generation_and_blocks_stay_from_then_on():
    """D has another plan. Neither the same failure nor another one leads to a second try."""
    script = lost()
    found(script)
    script.left(A, C)
    script.tell(CutRefused, D, 3, "another plan", 0)
    assert script.tick() == [Form(4, script.now(A, C, D))]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)}, of=2)
    assert script.tick() == [GoLive(4, Stamp(2, 8), script.now(A, C, D))]
    script.beat({A: 10, C: 10, D: 10})
    assert found(script) == []
    script.start(B)
    script.ready(B)
    assert script.tick() == [Form(5, script.now(A, B, C, D), 11)]
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    script.tick()
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(C)
    script.tick()
    script.formed(dict.fromkeys((A, B, D), (12, 13)))
    script.tick()
    script.beat({A: 15, B: 15, D: 15})
    assert found(script, frozenset({C.worker})) == []


def test_who_returns_ends_a_move_and_gets_blocks_of_those_who_took_them():
    script = lost()
    found(script)
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.beat({A: 10, C: 10, D: 10})
    script.start(B)
    script.ready(B)
    assert script.tick() == [Form(4, script.now(A, B, C, D), 11)]
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    assert script.tick() == [GoLive(4, Stamp(3, 11), script.now(A, C, D), cut=MOVED)]
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(B)
    assert script.tick() == [Form(5, script.now(A, C, D))]
    script.formed(dict.fromkeys((A, C, D), (12, 13)))
    script.tick()
    script.beat({A: 15, C: 15, D: 15})
    assert found(script) == [Form(6, script.now(A, C, D), 16, MOVED)]


def test_joiners_come_before_blocks():
    script = lost()
    script.start(B)
    script.ready(B)
    assert found(script) == [Form(3, script.now(A, B, C, D), 8)]


@pytest.mark.parametrize("failed", [frozenset(), frozenset({D.worker}), frozenset({B.worker, C.worker})])
def test_a_cut_for_other_failures_is_not_used(failed):
    assert found(lost(), failed) == []


def test_without_a_rule_blocks_stay():
    assert found(lost(rule=None)) == []


def test_blocks_move_where_that_pays_before_the_return_that_is_expected():
    """At 12.5 GB/s the two moves of 1 GB take 0.16 s, which a gain of a half makes up for in 0.32 s."""
    assert found(lost(MoveRule(Outages(0.31)))) == []
    script = lost(MoveRule(Outages(0.33)))
    assert found(script) == [Form(3, script.now(A, C, D), 8, MOVED)]


def test_how_long_a_move_takes_and_how_long_workers_stay_away_is_learnt():
    """A move for which all wait for two seconds, and outages of ten: then such a move does not pay any more."""
    script = lost(MoveRule(Outages()))
    assert found(script) == [Form(3, script.now(A, C, D), 8, MOVED)]
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.time += 2.0
    for member in (A, C, D):
        script.tell(PhaseTimed, member, 3, "state", 0.5, 0)
    assert script.membership.moves.rule.bytes_per_s == 5e8
    script.beat({A: 10, C: 10, D: 10})
    script.start(B)
    script.ready(B)
    script.tick()
    assert script.membership.moves.rule.outages.expected_s == 2.0
    script.formed({A: (10, 11), B: (), C: (10, 11), D: (10, 11)})
    script.tick()
    script.beat(dict.fromkeys((A, B, C, D), 13))
    script.die(B)
    script.tick()
    script.formed(dict.fromkeys((A, C, D), (12, 13)))
    script.tick()
    script.beat({A: 15, C: 15, D: 15})
    assert found(script) == []


def test_a_second_failure_in_the_midst_of_a_move_is_survived_with_the_blocks_of_before():
    """D is killed once A has got its blocks, and C has not; A has its own state of before, too, and D finds it."""
    script = lost()
    found(script)
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.die(D)
    assert script.tick() == [StageLost((1,))]
    script.start(D)
    script.ready(D)
    assert script.tick() == [Form(4, script.now(A, C, D))]
    script.left(A, C, D)
    before, moved = Stamp(2, 8), Stamp(3, 8)
    for member, held in ((A, {before, moved}), (C, {before}), (D, {before})):
        script.tell(Formed, member, 4, frozenset(held), 0)
    assert script.tick() == [GoLive(4, moved, script.now(A), cut=MOVED)]


def test_blocks_that_one_worker_took_over_are_all_there_where_its_stage_alone_is_left_and_another_joins():
    """D dies, so that stage 1 waits for it; A has all blocks of the newest state, and D, which returns, has none."""
    script = lost()
    found(script)
    script.formed({A: (7, 8), C: (7, 8), D: (7, 8)})
    script.tick()
    script.beat({A: 10, C: 10, D: 10})
    script.die(D)
    script.tick()
    script.start(D)
    script.ready(D)
    script.tick()
    script.formed({A: (8, 9), C: (8, 9), D: ()})
    assert script.tick() == [GoLive(4, Stamp(3, 9), script.now(A, C), cut=MOVED)]


def test_where_nobody_has_a_block_in_the_midst_of_a_move_all_go_back_with_the_blocks_of_the_run():
    script = lost()
    found(script)
    script.formed({A: (), C: (7, 8), D: ()})
    assert script.tick() == [GoLive(3, None)]
    script.membership, commands = script.membership.on(CheckpointsListed(script.time, 4, True, False, 8))
    assert commands == (Form(4, script.now(A, C, D)),)
