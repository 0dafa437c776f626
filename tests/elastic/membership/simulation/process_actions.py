"""Simulated processes that obey: what they read, and the iterations that they do."""

from swift.elastic.membership.messages import (
    ActivateGeneration,
    Connect,
    Departed,
    Formed,
    FormGeneration,
    Heartbeat,
    Loaded,
    PhaseTimed,
    PreloadPrograms,
    Ready,
    RecutFailed,
    StartGeneration,
    StateId,
)
from tests.elastic.membership.simulation.state import WorldState


class ProcessActions(WorldState):
    """The side of the processes."""

    def beat(self, one):
        one.outbox.append(Heartbeat(one.member, one.number if one.runs else 0, one.begun, one.ended, 0))

    def read(self, one):
        if not (one.can_act and one.inbox) or one.is_cut_off:
            return
        match one.inbox.popleft():
            case FormGeneration(number, members, after) as form:
                assert number > one.number, "the number of a generation goes back"
                policy = self.membership.policy
                assert one.number == 0 or not policy.joins_once, "a process joins a second generation"
                assert set(self.newest) == {process for process, _ in members} or not policy.needs_all
                assert one.member in members
                if one.runs and after is not None and max(one.begun, one.done + 1) <= after:
                    one.leaving = form
                else:
                    self.leave(one, form)
            case PreloadPrograms(number):
                one.loading = number
            case Connect(number):
                if number == one.number:
                    one.group = one.group if self.forms[number].stays_connected else number
                    one.outbox.append(PhaseTimed(one.member, number, "connect", 0.1, 0))
                    found = {(process, stamp) for process, stamps in self.handed_over.items() for stamp in stamps}
                    one.outbox.append(Formed(one.member, number, frozenset(one.states), 0, frozenset(found)))
            case StartGeneration(ActivateGeneration(number, stamp, cut=cut), _, is_restored):
                assert number == one.number
                one.moved_from = None
                if stamp is None or is_restored:
                    what = "the beginning" if stamp is None else self.restored[number]
                    stamp = StateId(number, 0 if stamp is None else stamp.step)
                    one.states = {stamp: what}
                    self.cut_of[stamp] = self.processes_in(number)
                elif cut != self.forms[number].cut:
                    one.states = {stamp: one.states[stamp]} if stamp in one.states else {}
                    one.moved_from, stamp = stamp, StateId(number, stamp.step)
                    one.states[stamp] = f"{self.state_of[number]}, moved"
                else:
                    one.states = {stamp: one.states.get(stamp) or self.state_of[number]}
                    assert one.states[stamp] == self.state_of[number], "survivors continue from different states"
                one.runs, one.done, one.begun, one.ended = True, stamp.step, 0, 0
                self.handed_over[one.member.process] = set(one.states)

    def leave(self, one, form):
        one.runs, one.leaving, one.number, one.kept = False, None, form.number, dict(one.states)
        if form.stays_connected:
            assert one.group == form.number - 1, "a process is to keep connections that it does not have"
        else:
            one.group = 0
        if form.cut and one.is_unlike:
            one.outbox.append(RecutFailed(one.member, form.number, "another plan", 0))
            return
        self.answers[form.number][one.member] = frozenset(one.states)
        if self.is_elastic:
            self.handed_over.setdefault(one.member.process, set()).update(one.states)
        self.have_left[form.number].add(one.member)
        one.outbox.append(Departed(one.member, form.number, 0))

    def stumble(self, one):
        if one.can_act and one.runs:
            one.runs, one.leaving = False, None
            one.outbox.append(Ready(one.member, 0, one.number))

    def step(self, one):
        """Begins an iteration, or ends it, for which everybody has to have begun it."""
        if one.can_act and one.loading:
            refuses = one.is_unlike and one.number == one.loading
            answer = (
                RecutFailed(one.member, one.loading, "another plan", 0)
                if refuses
                else Loaded(one.member, one.loading, 0)
            )
            one.outbox.append(answer)
            one.loading = 0
        if not (one.can_act and one.runs):
            return
        begun = self.begun[one.number]
        if one.member.process in self.broken and not one.ended and not one.is_undead:
            one.is_up = False
        elif one.begun <= one.done:
            one.begun = begun[one.member] = one.done + 1
        elif not self.is_jammed and all(begun.get(member, 0) >= one.begun for member in self.forms[one.number].members):
            one.done = one.ended = one.begun
            one.states[StateId(one.number, one.done)] = f"iteration {one.done} of generation {one.number}"
            self.cut_of[StateId(one.number, one.done)] = self.processes_in(one.number)
            one.states.pop(one.moved_from, None)
            one.states = {stamp: state for stamp, state in one.states.items() if stamp.step > one.done - 2}
            if one.leaving is not None and one.done >= one.leaving.after:
                self.leave(one, one.leaving)
        self.beat(one)
