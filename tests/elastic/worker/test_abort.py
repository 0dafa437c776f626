"""Which group a worker aborts when a generation is to be formed at once, and which it keeps for the next one."""

from types import SimpleNamespace

import pytest

from swift.elastic.jax_group import JaxGroupError
from swift.elastic.membership.messages import FormGeneration, Ready
from swift.elastic.transport.messages import FormGroup
from swift.elastic.worker.worker import AbortableGroup, WorkerProcess
from swift.schedules.plans.normalize import ChunkAssignment


class Group:
    num_aborted = 0

    def abort(self):
        self.num_aborted += 1


def test_a_group_that_is_made_after_the_command_is_aborted_and_that_of_the_next_generation_is_not():
    """The main thread may be about to connect to those of whom one has died when the command arrives."""
    waits = AbortableGroup(lambda: None)
    waits.number = 3
    abort = waits.aborter(4)
    abort()
    waits.group = old = Group()
    abort()
    assert old.num_aborted == 1
    waits.number, waits.group = 4, Group()
    abort()
    assert (old.num_aborted, waits.group.num_aborted) == (1, 0)


class Ended(Exception):
    """There are no more commands."""


class Worker(WorkerProcess):
    """One that is to form these generations, whose connections fail in the first."""

    def __init__(self, *forms):
        self.forms, self.joined, self.sent = list(forms), [], []
        self._data = [SimpleNamespace(skip_to=lambda _: None)]
        self._channel = SimpleNamespace(send=lambda kind, **fields: self.sent.append((kind, fields)))
        self._commands = SimpleNamespace(wait_to_form=lambda *_: self.next())

    def next(self):
        if not self.forms:
            raise Ended
        return FormGroup(self.forms.pop(0), "address")

    def _join_generation(self, command):
        self.joined.append(command.form.number)
        if command.form.number == 1:
            raise JaxGroupError("a connection is broken")


def test_connections_that_are_broken_are_not_kept_as_blocks_move():
    """Nobody has died, so the others would wait for this process in a collective."""
    worker = Worker(
        FormGeneration(1, ()),
        FormGeneration(2, (), after=8, cut=ChunkAssignment(((0, 0), (0, 1)))),
        FormGeneration(3, ()),
    )
    with pytest.raises(Ended):
        worker.run(0)
    assert worker.joined == [1, 3]
    assert worker.sent == [(Ready, {"number": 0}), (Ready, {"number": 2})]


def test_connections_are_kept_as_blocks_move():
    worker = Worker(FormGeneration(2, ()), FormGeneration(3, (), after=8, cut=ChunkAssignment(((0, 0), (0, 1)))))
    with pytest.raises(Ended):
        worker.run(0)
    assert worker.joined == [2, 3]
