"""The checkpoint service gets what the saver decides, and a save when all parts of a snapshot are there.

What is decided is tested in ``tests/checkpoint/test_saver.py``.
"""

import signal
from types import SimpleNamespace

import pytest

from swift.checkpoint.saver import (
    FallbackRequested,
    WriterAction,
    WriterDied,
)
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
        return WriterAction.KILL in self.saving.tick()

    def dies(self):
        self.children.alive.remove(CHECKPOINT_SERVICE)
        return WriterAction.GIVE_UP not in self.saving.on(WriterDied())

    def fails(self, step):
        """The report on a failed save."""
        return self.saving.take_answer(CHECKPOINT_ANSWERS.line(CommandFailed("save", step, "No space left on device")))

    def tries_again_after(self, seconds):
        """Whether it asks again, after so many seconds."""
        self.now, before = self.now + seconds, len(self.children.asked)
        self.saving.tick()
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


@pytest.mark.parametrize("is_full", [True, False])
def test_of_the_newest_checkpoint_it_is_known_whether_it_holds_everything(keeping, monkeypatch, is_full):
    monkeypatch.setattr(service_clients, "checkpoint_steps", lambda _: [20, 40])
    monkeypatch.setattr(service_clients, "read_manifest", lambda *_: SimpleNamespace(is_full=is_full))
    assert (keeping.saving.newest, keeping.saving.newest_is_complete) == (40, is_full)


def test_a_save_that_has_failed_is_told_of_and_tried_again_after_a_pause(keeping):
    keeping.add(5)
    line = "the checkpoint of iteration 5 was not saved: No space left on device; trying again in 2 s"
    assert keeping.fails(5).line == line
    assert keeping.saving.unsaved == 5
    assert not keeping.tries_again_after(1.9)
    assert keeping.tries_again_after(0.2)
    keeping.answers(5)
    assert keeping.saving.unsaved is None
    assert keeping.children.asked == [save(5), save(5)]


def test_a_load_that_fails_is_answered_and_does_not_count_as_a_save(keeping):
    keeping.saving.load(2, [ONLY])
    assert keeping.children.asked == [LoadCheckpoint(None, 2, (ONLY,))]
    failed = CommandFailed("load", 5, "damaged", 2)
    assert keeping.saving.take_answer(CHECKPOINT_ANSWERS.line(failed)) == failed
    assert not keeping.saving.is_busy


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


@pytest.mark.parametrize(("written", "asked"), [(4, [save(5)]), (5, [])])
def test_a_load_waits_for_a_save_and_its_record_but_for_none_that_is_lost(keeping, written, asked):
    keeping.record.written, keeping.record.on_file = written, 4
    keeping.add(5)
    keeping.saving.load(2, [ONLY])
    assert keeping.children.asked == asked


def test_a_save_whose_record_cannot_be_written_is_kept_elsewhere(keeping):
    keeping.record.on_file = 4
    keeping.add(5)
    assert keeping.saving.unsaved == 5
    keeping.saving.on(FallbackRequested())
    assert keeping.children.asked == [SaveCheckpoint(StateId(1, 5), (ONLY,), is_elsewhere=True)]
    keeping.saving.take_answer(CHECKPOINT_ANSWERS.line(KeptElsewhere(5, "there")))
    assert not keeping.saving.is_busy
    assert keeping.saving.unsaved is None


def test_what_could_not_be_saved_is_kept_elsewhere_in_the_end(keeping):
    keeping.add(5)
    keeping.fails(5)
    keeping.saving.on(FallbackRequested())
    assert keeping.children.asked == [save(5), SaveCheckpoint(StateId(1, 5), (ONLY,), is_elsewhere=True)]
    assert keeping.saving.is_busy
    keeping.saving.take_answer(CHECKPOINT_ANSWERS.line(KeptElsewhere(5, "there")))
    assert not keeping.saving.is_busy
    assert not keeping.tries_again_after(100)


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
