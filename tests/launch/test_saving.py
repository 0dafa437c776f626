"""The keeper is asked one thing after the other, and again where it has died or is too late."""

import signal
from types import SimpleNamespace

import pytest

from swift.launch import saving
from swift.launch.keeper_wire import Load, Save, Saved, answer_line, read_command
from swift.launch.saving import KEEPER, Saving
from swift.launch.wire import Snapshot
from swift.mesh.epochs import Member, Process, Stamp

ONLY = Process((0, 0))
DEADLINE_S = 30.0


class Listed:
    """Children of which only what was done with them is known."""

    def __init__(self):
        self.alive, self.asked, self.signals = set(), [], []

    def __contains__(self, who):
        return who in self.alive

    def start(self, who, _command, _log):
        self.alive.add(who)

    def say(self, _, line):
        self.asked.append(read_command(line))

    def signal(self, who, number):
        self.signals.append((who, number))


class Keeping:
    """A ``Saving``, its keeper and its clock."""

    def __init__(self, directory):
        self.now, self.children = 0.0, Listed()
        log, checkpoints = directory / "log", directory / "checkpoints"
        self.saving = Saving(self.children, ["keep"], log, checkpoints, [ONLY], DEADLINE_S, lambda: self.now)

    def add(self, step):
        self.saving.add(Snapshot(Member(ONLY, 0), Stamp(1, step), 1.0))

    def is_ended_after(self, seconds):
        self.now += seconds
        return self.saving.end_if_late()

    def dies(self):
        self.children.alive.remove(KEEPER)
        return self.saving.died()

    def answers(self, step):
        self.saving.hear(answer_line(Saved(step, 0.1, f"step-{step}", {})))


@pytest.fixture
def keeping(tmp_path):
    return Keeping(tmp_path)


def save(step):
    return Save(Stamp(1, step), (ONLY,))


def test_a_keeper_that_is_late_is_killed_once_and_its_next_life_is_asked_again(keeping):
    keeping.add(5)
    assert not keeping.is_ended_after(DEADLINE_S)
    assert keeping.is_ended_after(1)
    assert not keeping.is_ended_after(DEADLINE_S + 1), "its death is on its way"
    assert keeping.children.signals == [(KEEPER, signal.SIGKILL)]
    assert keeping.dies()
    assert keeping.children.asked == [save(5), save(5)]
    assert not keeping.is_ended_after(DEADLINE_S), "the next life has as long as the first"
    assert keeping.is_ended_after(1)


def test_a_keeper_that_has_nothing_to_do_is_not_late(keeping):
    keeping.saving.start()
    assert not keeping.is_ended_after(10 * DEADLINE_S)
    keeping.add(5)
    keeping.answers(5)
    assert not keeping.saving.is_busy
    assert not keeping.is_ended_after(10 * DEADLINE_S)


def test_each_question_has_a_deadline_of_its_own(keeping):
    keeping.add(5)
    keeping.saving.load(2, [ONLY])
    keeping.is_ended_after(DEADLINE_S)
    keeping.answers(5)
    assert keeping.children.asked[-1] == Load(None, 2, (ONLY,))
    assert not keeping.is_ended_after(DEADLINE_S)
    assert keeping.is_ended_after(1)


def test_the_next_life_is_asked_for_the_newest_save_only(keeping):
    """The parts of the one before may be gone by then."""
    for step in (5, 10, 15):
        keeping.add(step)
    keeping.saving.load(2, [ONLY])
    keeping.dies()
    assert keeping.children.asked == [save(5), save(15)]
    keeping.answers(15)
    assert keeping.children.asked[-1] == Load(None, 2, (ONLY,))


def test_a_save_before_a_load_is_asked_for_again(keeping):
    """What is loaded is the newest checkpoint: that one, if it can be had."""
    keeping.add(5)
    keeping.saving.load(2, [ONLY])
    keeping.dies()
    assert keeping.children.asked == [save(5), save(5)]


def test_who_dies_three_times_over_one_question_is_given_up(keeping):
    keeping.add(5)
    assert keeping.dies()
    assert keeping.dies()
    assert not keeping.dies()


def test_an_answer_makes_up_for_deaths(keeping):
    keeping.add(5)
    for step in (5, 10, 15):
        assert keeping.dies()
        keeping.answers(step)
        keeping.add(step + 5)


@pytest.mark.parametrize(("step", "is_full", "goes"), [(20, True, True), (20, False, False), (40, True, False)])
def test_a_checkpoint_is_preferred_to_states_where_it_is_newer_and_nothing_is_lost(
    keeping, monkeypatch, step, is_full, goes
):
    monkeypatch.setattr(saving, "checkpoint_steps", lambda _: [20, 40])
    monkeypatch.setattr(saving, "read_manifest", lambda *_: SimpleNamespace(is_full=is_full))
    assert keeping.saving.goes_beyond(step) == goes
