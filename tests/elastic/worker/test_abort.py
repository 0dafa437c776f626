"""Which group a worker aborts when a generation is to be formed at once."""

from swift.elastic.worker.group_waits import GroupWaits


class Group:
    num_aborted = 0

    def abort(self):
        self.num_aborted += 1


def test_a_group_that_is_made_after_the_command_is_aborted_and_that_of_the_next_generation_is_not():
    """The main thread may be about to connect to those of whom one has died when the command arrives."""
    waits = GroupWaits(lambda: None)
    waits.number = 3
    abort = waits.aborter(4)
    abort()
    waits.group = old = Group()
    abort()
    assert old.num_aborted == 1
    waits.number, waits.group = 4, Group()
    abort()
    assert (old.num_aborted, waits.group.num_aborted) == (1, 0)
