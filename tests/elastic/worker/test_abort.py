"""Which group a worker aborts when a generation is to be formed at once."""

from swift.elastic.worker import WorkerProcess


class Group:
    num_aborted = 0

    def abort(self):
        self.num_aborted += 1


def test_a_group_that_is_made_after_the_command_is_aborted_and_that_of_the_next_generation_is_not():
    """The main thread may be about to connect to those of whom one has died when the command arrives."""
    worker = object.__new__(WorkerProcess)
    worker._group, worker._number, worker._abort_limit_s = None, 3, None
    abort = worker._aborter(4)
    abort()
    worker._group = old = Group()
    abort()
    assert old.num_aborted == 1
    worker._number, worker._group = 4, Group()
    abort()
    assert (old.num_aborted, worker._group.num_aborted) == (1, 0)
