"""The journal and the goodput of any history: every second and every repeated iteration counts once."""

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.elastic.membership.messages import ActivateGeneration, Formed, Heartbeat, Ready, StateId
from swift.elastic.membership.status import ProcessState
from swift.elastic.reporting.goodput import CAUSES
from tests.elastic.reporting.histories import ALL, LIMITS, History


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
            if isinstance(command, ActivateGeneration):
                stamp = command.stamp or StateId(command.number, 0)
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
        self.kept[process] = frozenset(kept | {StateId(self.membership.last_live, step)})

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
    deaths, recoveries = drill.noted("process_died"), drill.noted("recovery")
    assert goodput["num_deaths"] == len(deaths)
    assert goodput["num_recoveries"] == len(recoveries)
    for note in recoveries:
        fields = note.fields
        assert fields["recovery_s"] >= fields["detection_s"] + fields["coordination_s"] - 1e-3
        assert note.step > fields["resumed_from"]
