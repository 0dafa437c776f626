"""The checkpoint service is asked one thing after the other, and again where it has died or is too late."""

import signal
from types import SimpleNamespace

import pytest

from swift.elastic.coordinator import service_clients
from swift.elastic.coordinator.service_clients import CHECKPOINT_SERVICE, CheckpointClient
from swift.elastic.membership.messages import Member, Process, StateId, processes_of
from swift.elastic.transport.messages import (
    CHECKPOINT_ANSWERS,
    CHECKPOINT_COMMANDS,
    CommandFailed,
    KeptElsewhere,
    LoadCheckpoint,
    SaveCheckpoint,
    Saved,
    SnapshotKept,
)
from swift.schedules.plans.normalize import ChunkAssignment
from swift.topology import Topology

ONLY = Process((0, 0))
START_S, DEADLINE_S = 10.0, 30.0


class Listed:
    """Children of which only what was done with them is known."""

    def __init__(self):
        self.alive, self.asked, self.signals = set(), [], []

    def __contains__(self, who):
        return who in self.alive

    def start(self, who, _command, _log):
        self.alive.add(who)

    def send(self, _, line):
        self.asked.append(CHECKPOINT_COMMANDS.read(line))

    def signal(self, who, number):
        self.signals.append((who, number))


class Keeping:
    """A ``CheckpointClient``, its checkpoint_service and its clock."""

    def __init__(self, directory, processes=(ONLY,), **settings):
        self.now, self.children = 0.0, Listed()
        self.record = SimpleNamespace(written=1000, on_file=1000)
        log, checkpoints = directory / "log", directory / "checkpoints"
        self.saving = CheckpointClient(
            children=self.children,
            command=["keep"],
            log=log,
            directory=checkpoints,
            processes=processes,
            start_s=START_S,
            deadline_s=DEADLINE_S,
            record=self.record,
            clock=lambda: self.now,
            **settings,
        )

    def add(self, step, process=ONLY):
        self.saving.add(SnapshotKept(Member(process, 0), StateId(1, step), 1.0))

    def is_ended_after(self, seconds):
        self.now += seconds
        return self.saving.kill_if_late()

    def dies(self):
        self.children.alive.remove(CHECKPOINT_SERVICE)
        return self.saving.died()

    def fails(self, step):
        self.saving.take_answer(CHECKPOINT_ANSWERS.line(CommandFailed("save", step, "No space left on device")))

    def tries_again_after(self, seconds):
        """Whether it asks again, after so many seconds."""
        self.now, before = self.now + seconds, len(self.children.asked)
        self.saving.send_if_due()
        return len(self.children.asked) > before

    def answers(self, step):
        self.saving.take_answer(CHECKPOINT_ANSWERS.line(Saved(step, 0.1, f"step-{step}", {})))


@pytest.fixture
def keeping(tmp_path):
    return Keeping(tmp_path)


def save(step):
    return SaveCheckpoint(StateId(1, step), (ONLY,))


def test_a_checkpoint_service_that_is_late_is_killed_once_and_its_next_life_is_asked_again(keeping):
    keeping.add(5)
    assert not keeping.is_ended_after(START_S + DEADLINE_S), "it may have to start first"
    assert keeping.is_ended_after(1)
    assert not keeping.is_ended_after(START_S + DEADLINE_S + 1), "its death is on its way"
    assert keeping.children.signals == [(CHECKPOINT_SERVICE, signal.SIGKILL)]
    assert keeping.dies()
    assert keeping.children.asked == [save(5), save(5)]
    assert not keeping.is_ended_after(START_S + DEADLINE_S), "the next life has as long as the first"
    assert keeping.is_ended_after(1)


def test_a_checkpoint_service_that_has_long_been_there_has_no_time_to_start(keeping):
    keeping.saving.start()
    keeping.now += START_S
    keeping.add(5)
    assert not keeping.is_ended_after(DEADLINE_S)
    assert keeping.is_ended_after(1)


def test_a_checkpoint_service_that_has_nothing_to_do_is_not_late(keeping):
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
    assert keeping.children.asked[-1] == LoadCheckpoint(None, 2, (ONLY,))
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
    assert keeping.children.asked[-1] == LoadCheckpoint(None, 2, (ONLY,))


def test_a_save_before_a_load_is_asked_for_again(keeping):
    """The newest checkpoint is to be loaded: that one, if it can be had."""
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


@pytest.mark.parametrize("is_full", [True, False])
def test_of_the_newest_checkpoint_it_is_known_whether_it_holds_everything(keeping, monkeypatch, is_full):
    monkeypatch.setattr(service_clients, "checkpoint_steps", lambda _: [20, 40])
    monkeypatch.setattr(service_clients, "read_manifest", lambda *_: SimpleNamespace(is_full=is_full))
    assert (keeping.saving.newest, keeping.saving.newest_is_complete) == (40, is_full)


def test_a_save_that_has_failed_is_tried_again_after_pauses_and_then_given_up(keeping):
    keeping.add(5)
    for pause_s in service_clients.RETRY_PAUSES_S:
        keeping.fails(5)
        assert keeping.saving.is_busy
        assert keeping.saving.pause_s == pause_s
        assert not keeping.tries_again_after(0.9 * pause_s)
        assert keeping.tries_again_after(0.2 * pause_s)
        assert not keeping.tries_again_after(100), "it is asked already"
    keeping.fails(5)
    assert not keeping.saving.is_busy
    assert not keeping.tries_again_after(1000)
    assert keeping.children.asked == [save(5)] * (1 + len(service_clients.RETRY_PAUSES_S))
    assert keeping.saving.unsaved == save(5)


def test_a_save_that_succeeds_in_the_end_leaves_nothing_unsaved(keeping):
    keeping.add(5)
    keeping.fails(5)
    assert keeping.tries_again_after(100)
    keeping.answers(5)
    assert keeping.saving.unsaved is None
    assert not keeping.saving.is_busy
    keeping.add(10)
    keeping.fails(10)
    assert keeping.saving.pause_s == service_clients.RETRY_PAUSES_S[0]


def test_a_save_is_held_back_until_its_record_is_in_the_file(keeping):
    """The file system of the record may stall: then the service is not late."""
    keeping.record.on_file = 4
    keeping.add(5)
    assert keeping.saving.is_busy
    assert not keeping.tries_again_after(10 * DEADLINE_S)
    assert not keeping.is_ended_after(10 * DEADLINE_S)
    keeping.record.on_file = 5
    assert keeping.tries_again_after(0)
    assert keeping.children.asked == [save(5)]
    assert not keeping.tries_again_after(0)


def test_a_save_does_not_wait_for_a_record_that_is_lost(keeping):
    keeping.record.written = keeping.record.on_file = 4
    keeping.add(5)
    assert not keeping.tries_again_after(9)
    assert keeping.tries_again_after(2)


@pytest.mark.parametrize(("written", "asked"), [(4, [save(5)]), (5, [])])
def test_a_load_waits_for_a_save_and_its_record_but_for_none_that_is_lost(keeping, written, asked):
    keeping.record.written, keeping.record.on_file = written, 4
    keeping.add(5)
    keeping.saving.load(2, [ONLY])
    assert keeping.children.asked == asked


def test_a_save_whose_record_cannot_be_written_is_kept_elsewhere(keeping):
    keeping.record.on_file = 4
    keeping.add(5)
    assert keeping.saving.unsaved == save(5)
    keeping.saving.save_fallback()
    assert keeping.children.asked == [SaveCheckpoint(StateId(1, 5), (ONLY,), is_elsewhere=True)]
    keeping.saving.take_answer(CHECKPOINT_ANSWERS.line(KeptElsewhere(5, "there")))
    assert not keeping.saving.is_busy
    assert keeping.saving.unsaved is None


def test_a_newer_save_takes_the_place_of_one_that_is_held_back(keeping):
    keeping.record.on_file = 4
    keeping.add(5)
    keeping.add(10)
    keeping.record.on_file = 5
    assert not keeping.tries_again_after(0)
    keeping.record.on_file = 10
    assert keeping.tries_again_after(0)
    assert keeping.children.asked == [save(10)]


def test_the_next_life_of_the_service_is_not_asked_for_a_save_that_is_held_back(keeping):
    keeping.saving.start()
    keeping.record.on_file = 4
    keeping.add(5)
    assert keeping.dies()
    assert keeping.children.asked == []
    keeping.record.on_file = 5
    assert keeping.tries_again_after(0)


def test_a_newer_save_takes_the_place_of_one_that_has_failed(keeping):
    keeping.add(5)
    keeping.fails(5)
    keeping.add(10)
    assert not keeping.tries_again_after(100)
    keeping.answers(10)
    keeping.add(15)
    keeping.add(20)
    keeping.fails(15)
    assert keeping.saving.unsaved is None
    assert keeping.children.asked == [save(step) for step in (5, 10, 15, 20)]


def test_what_could_not_be_saved_is_tried_once_more_before_a_checkpoint_is_loaded_and_then_no_more(keeping):
    """All resume from the checkpoint that is loaded then; that state is none of theirs any more."""
    keeping.add(5)
    keeping.fails(5)
    keeping.saving.load(2, [ONLY])
    keeping.fails(5)
    assert keeping.children.asked == [save(5), save(5), LoadCheckpoint(None, 2, (ONLY,))]
    assert keeping.saving.unsaved is None
    assert not keeping.tries_again_after(100)


def test_what_could_not_be_saved_is_kept_elsewhere_in_the_end(keeping):
    keeping.add(5)
    keeping.fails(5)
    keeping.saving.save_fallback()
    assert keeping.children.asked == [save(5), SaveCheckpoint(StateId(1, 5), (ONLY,), is_elsewhere=True)]
    assert keeping.saving.is_busy
    keeping.saving.take_answer(CHECKPOINT_ANSWERS.line(KeptElsewhere(5, "there")))
    assert not keeping.saving.is_busy
    assert not keeping.tries_again_after(100)


def test_nothing_is_kept_elsewhere_where_all_is_saved(keeping):
    keeping.add(5)
    keeping.answers(5)
    keeping.saving.save_fallback()
    assert keeping.children.asked == [save(5)]


def test_what_is_saved_has_every_chunk_and_what_a_worker_kept_before_it_died_counts(tmp_path):
    """0:0 has the first two of three chunks, 0:1 the last, 1:0 the first, 1:1 the last two."""
    processes = processes_of(Topology(2, 2))
    first, second, third, fourth = processes
    keeping = Keeping(tmp_path, processes, own_cut=ChunkAssignment(((0, 0, 1), (0, 1, 1))))
    keeping.add(5, third)
    keeping.add(5, second)
    assert keeping.children.asked == []
    keeping.saving.set_processes([first, second, third])
    keeping.add(5, fourth)
    assert keeping.children.asked == [SaveCheckpoint(StateId(1, 5), (second, third, fourth))]
    keeping.answers(5)
    keeping.add(8, first)
    keeping.add(8, second)
    assert keeping.children.asked[1:] == [SaveCheckpoint(StateId(1, 8), (first, second))]


def test_where_blocks_have_moved_a_worker_that_has_all_of_them_is_enough(tmp_path):
    """In generation 1, and no other: 0:0 has the blocks of 0:1, too, and 1:0 and 1:1 have one each."""
    first, second, third, _ = processes = processes_of(Topology(2, 2))
    keeping, cut = Keeping(tmp_path, processes), ChunkAssignment(((0, 0), (0, 1)))
    keeping.saving.set_processes([first, *processes[2:]], 1, cut)
    keeping.saving.set_processes(processes, 2)
    keeping.add(5, third)
    assert keeping.children.asked == []
    keeping.add(5, first)
    assert keeping.children.asked == [SaveCheckpoint(StateId(1, 5), (first, third), cut=cut)]
    keeping.answers(5)
    for process in (first, second):
        assert keeping.children.asked[1:] == []
        keeping.saving.add(SnapshotKept(Member(process, 0), StateId(2, 8), None))
    assert keeping.children.asked[1:] == [SaveCheckpoint(StateId(2, 8), (first, second))]


def test_of_a_worker_that_is_not_needed_no_ranks_are_saved(tmp_path):
    """1:0 and 1:1 have every chunk; of 0:0 one rank has kept its part before them."""
    processes = processes_of(Topology(2, 2, 2), by_rank=True)
    keeping = Keeping(tmp_path, processes, own_cut=ChunkAssignment(((0, 0, 1), (0, 1, 1))))
    for process in (processes[0], *processes[4:]):
        assert keeping.children.asked == []
        keeping.add(5, process)
    assert keeping.children.asked == [SaveCheckpoint(StateId(1, 5), processes[4:])]
