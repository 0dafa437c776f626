"""What must hold of every generation: its members, the state that it starts from, the blocks that move for it."""

from swift.elastic.membership.messages import (
    CheckpointsListed,
    FormGeneration,
    ReshardState,
    RestoreState,
    StartGeneration,
    StopRun,
    newest_complete_state,
)
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT
from tests.elastic.membership.simulation.state import WorldState


class GenerationChecks(WorldState):
    """Assertions about commands that form a generation and let it run."""

    def check_form(self, form):
        before = self.forms.setdefault(form.number, form)
        assert before.members == form.members, "a generation has two sets of members"
        assert before is form, "a generation is formed twice"
        self.answers[form.number], self.begun[form.number], self.have_left[form.number] = {}, {}, set()
        type(self).num_generations += 1
        left_out = [one for one in self.everybody if one.is_running and one.member not in form.members]
        assert not left_out, "who may still run is left out"
        assert not self.retired & {process for process, _ in form.members}, "a retired process is a member again"
        if form.cut:
            self.check_move(form)

    def check_move(self, form):
        """Blocks move to live members only, in a planned change of a generation that runs."""
        type(self).num_moves += 1
        workers = {process.worker for process, _ in form.members}
        there = {dict(form.cut.moves).get(worker, worker) for worker in workers}
        live = {pipeline for pipeline, _ in there}
        places = {(d, p) for d, stages in enumerate(form.cut.stage_of_chunk) if d in live for p in stages}
        assert places <= there, "a block moves to a worker that is down"
        before = self.forms[max(self.goes)]
        assert form.members == before.members, "blocks move while somebody joins or is lost"
        assert not before.cut, "blocks move before they are back"
        assert form.after is not None, "blocks move in the midst of an iteration"
        assert not self.is_refused, "blocks move though a process cannot take part in it"
        assert form.number - 1 == max(self.goes), "connections are kept that may be broken"
        assert self.ahead[before.number] == form.cut, "other blocks move than those for which programs were loaded"
        assert self.loaded[before.number] >= set(form.members), "a move does not wait for its programs"

    def check_load(self, ahead):
        """Programs are loaded ahead by all members of the generation that runs."""
        assert ahead.number == max(self.goes)
        assert ahead.members == self.forms[ahead.number].members
        self.ahead[ahead.number] = ahead.cut
        self.loaded[ahead.number].clear()

    def check_go(self, go):
        members, answers = self.forms[go.number].members, self.answers[go.number]
        assert set(answers) == set(members), "a generation goes before all have formed it"
        assert self.goes.setdefault(go.number, go.stamp) == go.stamp, "a generation continues from two states"
        assert len({self.by_member(member).group for member in members}) == 1, "members are not all connected"
        held_by = {member.process: held for member, held in answers.items()}
        holders = {member.process for member in go.holders}
        if go.stamp is not None:
            assert holders == {process for process, held in held_by.items() if go.stamp in held}
            self.check_no_loss(go, members, answers)
        if self.is_elastic:
            self.check_cut(go, holders)
        else:
            cut_of = {number: form.cut for number, form in self.forms.items()}
            assert go.stamp == newest_complete_state(
                tuple(self.newest), held_by, lambda number: cut_of.get(number, DEFAULT_ASSIGNMENT)
            )
            cut = cut_of.get(go.stamp.generation, DEFAULT_ASSIGNMENT) if go.stamp else DEFAULT_ASSIGNMENT
            assert go.cut == cut, "a state is taken for one with other blocks"
            assert go.stamp is None or self.are_enough(holders, cut), "a stage has no state to continue from"
        states = {self.by_member(member).states[go.stamp] for member in go.holders}
        assert len(states) == (go.stamp is not None), "holders have different states with one stamp"
        self.state_of[go.number] = states.pop() if states else None

    def check_cut(self, go, holders):
        """Members continue with slices that are all their own, or these are resharded from what is said to be there."""
        if go.stamp is None:
            return
        processes, cut = self.processes_in(go.number), self.cut_of[go.stamp]
        if go.layout is None:
            assert cut == processes, "members continue with slices of other ranks"
            assert holders == set(processes), "a member has nothing to continue with"
            return
        assert go.layout.processes == cut
        there = holders | {process for process, stamps in self.handed_over.items() if go.stamp in stamps}
        assert go.is_whole == (set(cut) <= there), "slices are lost and nobody says so, or the other way round"

    def check_no_loss(self, go, members, answers):
        """No more than the newest iteration is run again where those that ran last are enough."""
        ran = max((number for number in self.goes if number < go.number), default=None)
        survivors = [member for member in members if ran in (stamp.generation for stamp in answers[member])]
        newest = max((stamp.step for member in survivors for stamp in answers[member]), default=0)
        if survivors and self.are_enough({member.process for member in survivors}, self.forms[ran].cut):
            worth = 2 if self.is_elastic and go.is_whole else 1
            assert go.stamp.step >= newest - worth, "more than one iteration is lost"

    def check_without_checkpoint(self, go):
        """A lost state ends the run where there is no checkpoint, nor will be; at the beginning none is lost."""
        if go.stamp is None and self.forms[go.number].cut:
            _, (command,) = self.membership.on(CheckpointsListed(self.time, None, False, False, self.written()))
            assert isinstance(command, FormGeneration), "a checkpoint is loaded where blocks are elsewhere"
            assert not command.cut
            return
        is_lost = go.stamp is None and self.written() > 0
        for is_busy in (False, True):
            _, (command,) = self.membership.on(CheckpointsListed(self.time, None, False, is_busy, self.written()))
            kind = (
                (RestoreState if is_busy else StopRun) if is_lost else (ReshardState if go.layout else StartGeneration)
            )
            assert isinstance(command, kind), "a lost state is not noticed, or one that is there is given up"

    def check_ask(self, command):
        go = self.membership.generation.go
        assert command.number == go.number not in self.starts, "a state is fetched for a generation that runs"
        assert not self.forms[go.number].cut, "a state is fetched where blocks are elsewhere"
        if isinstance(command, RestoreState):
            is_newer = go.stamp is not None and self.newest_saved > go.stamp.step
            assert go.stamp is None or is_newer, "a checkpoint is preferred that is no newer"
            assert go.stamp is None or self.is_full or not go.is_whole, "a checkpoint costs experts that members have"
        else:
            assert (command.stamp, command.layout) == (go.stamp, go.layout)

    def check_start(self, start):
        """A generation runs once, from a state that is right for it: its own, or what was fetched for it."""
        number, stamp = start.go.number, start.go.stamp
        assert number == max(self.goes), "a generation runs that is not the newest"
        assert self.starts.setdefault(number, start) is start, "a generation is started twice"
        assert start.is_restored == (number in self.restored)
        if start.is_restored:
            assert stamp.generation == number
            return
        assert stamp == self.goes[number]
        assert stamp is not None or self.written() == 0, "all begin again though something was done"
        assert stamp is None or not (self.is_full and self.newest_saved > stamp.step), "a better checkpoint is ignored"
        assert start.go.layout is None, "members run with slices of other ranks"

    def check_running(self):
        """No two generations are run at the same time by processes that the run counts on.

        Whoever is retired may still run. It is in no generation from then on, and what it says changes nothing, see
        ``deliver``; an iteration of its own generation needs all who are in that, and the others have left.
        """
        numbers = {one.number for one in self.everybody if one.is_running}
        assert len(numbers) <= 1, "two generations are run at the same time"
        assert not numbers or max(numbers) == max(self.goes)
