"""Calls are carried out in their order, nobody waits for one, and one that fails is told."""

import threading
import time

import pytest

from swift.elastic.reporting.reporter import BackgroundCalls
from swift.errors import RunError


def test_calls_are_carried_out_in_their_order_while_who_asks_goes_on():
    done, answers = [], threading.Event()

    def stalls():
        assert answers.wait(30)
        done.append("stalled")

    with BackgroundCalls() as behind:
        behind.call(stalls)
        for number in range(100):
            behind.call(done.append, number)
        assert done == [], "who asks waits"
        answers.set()
        behind.settle()
        assert done == ["stalled", *range(100)]


def test_no_more_than_there_is_room_for_wait():
    answers, asked = threading.Event(), []
    with BackgroundCalls(max_waiting=2) as behind:
        behind.call(answers.wait)

        def ask():
            for number in range(4):
                behind.call(asked.append, number)
            asked.append("all asked for")

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        answers.set()
        asking.join(30)
    assert {*asked} == {0, 1, 2, 3, "all asked for"}


def test_a_call_that_fails_ends_what_follows_and_is_told():
    done = []

    def full():
        raise RunError("the record of the run cannot be written: No space left on device")

    behind = BackgroundCalls()
    behind.call(full)
    with pytest.raises(RunError, match=r"the record of the run cannot be written: .*No space left"):
        behind.settle()
    with pytest.raises(RunError, match="No space left"):
        behind.call(done.append, 1)
    assert done == []


def test_all_is_done_when_the_block_ends_also_by_an_error():
    done = []

    def fail():
        with BackgroundCalls() as behind:
            behind.call(time.sleep, 0.1)
            behind.call(done.append, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert done == [1]
