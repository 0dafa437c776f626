"""The compile service gets each request, is killed when silent, and gets the request again; so many times."""

import signal

import pytest

from swift.elastic.coordinator.service_clients import COMPILE_SERVICE, CompileClient
from swift.elastic.transport.messages import COMPILE_ANSWERS, COMPILE_REQUESTS, Alive, CompileRequest, Prepared
from swift.schedules.plans.normalize import ChunkAssignment

START_S, SILENCE_S = 100.0, 3.0
WISH, NEXT = CompileRequest(frozenset()), CompileRequest(frozenset({(0, 1)}))


class Listed:
    """Children of which only what was done with them is known."""

    def __init__(self):
        self.alive, self.told, self.signals = set(), [], []

    def __contains__(self, who):
        return who in self.alive

    def start(self, who, _command, _log):
        self.alive.add(who)

    def send(self, _, line):
        self.told.append(COMPILE_REQUESTS.read(line))

    def signal(self, who, number):
        self.signals.append((who, number))


class Watched:
    """A ``CompileClient``, its compile_service and its clock."""

    def __init__(self, directory, command=("prepare",)):
        self.now, self.children = 0.0, Listed()
        self.preparing = CompileClient(
            children=self.children,
            command=command,
            log=directory / "log",
            start_s=START_S,
            silence_s=SILENCE_S,
            clock=lambda: self.now,
        )

    def ask(self, wish):
        self.preparing.request(wish)
        self.preparing.send_request()
        return self

    def hear(self, said):
        return self.preparing.take_answer(COMPILE_ANSWERS.line(said), self.now)

    def is_ended_after(self, seconds):
        self.now += seconds
        return self.preparing.kill_if_silent()

    def dies(self):
        self.children.alive.remove(COMPILE_SERVICE)
        again = self.preparing.died()
        self.preparing.send_request()
        return again


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path).ask(WISH)


def prepared(compiled):
    return Prepared(frozenset(), None, ("single",), compiled, 1.0)


def test_each_wish_is_told_once(watched):
    watched.preparing.send_request()
    watched.ask(NEXT)
    assert watched.children.told == [WISH, NEXT]


def test_it_has_longer_to_start_than_between_two_signs_of_life(watched):
    assert not watched.is_ended_after(START_S)
    assert watched.hear(Alive()) is None
    assert not watched.is_ended_after(SILENCE_S)
    assert watched.hear(prepared(1)) == prepared(1)
    assert watched.is_ended_after(SILENCE_S + 0.1)
    assert watched.children.signals == [(COMPILE_SERVICE, signal.SIGKILL)]
    assert not watched.is_ended_after(2 * START_S), "its death is on its way"


def test_the_next_life_is_told_what_the_last_one_was(watched):
    watched.is_ended_after(START_S + 1)
    assert watched.dies()
    assert watched.children.told == [WISH, WISH]
    assert not watched.is_ended_after(START_S), "the next life has as long as the first"


def test_one_that_makes_nothing_ready_has_three_lives(watched):
    assert [watched.dies(), watched.dies(), watched.dies()] == [True, True, False]
    watched.ask(NEXT)
    assert watched.children.told == [WISH] * 3
    assert not watched.is_ended_after(START_S + 1)


def test_one_that_makes_something_ready_now_and_then_may_die_as_often_as_it_likes(watched):
    for _ in range(20):
        watched.hear(prepared(1))
        assert watched.dies()
    watched.hear(prepared(0))
    assert [watched.dies(), watched.dies()] == [True, False], "what was there already does not count"


def test_nothing_is_prepared_without_a_command(tmp_path):
    assert Watched(tmp_path, command=None).ask(WISH).children.alive == set()


def test_it_is_known_what_is_prepared_for_the_loss_of_a_process(tmp_path):
    watched = Watched(tmp_path)
    assert not watched.preparing.is_compiled((0, 1))
    watched.ask(WISH).hear(Prepared(frozenset(), None, ("single",), 1, 1.0))
    assert not watched.preparing.is_compiled((0, 1))
    watched.hear(Prepared(frozenset({(0, 1)}), None, ("single",), 1, 1.0))
    assert watched.preparing.is_compiled((0, 1))
    assert not watched.preparing.is_compiled((1, 1))
    watched.ask(NEXT)  # now that one is lost, it is the loss of another
    assert not watched.preparing.is_compiled((1, 1))
    watched.hear(Prepared(frozenset({(0, 1), (1, 0)}), None, ("single",), 1, 1.0))
    assert watched.preparing.is_compiled((1, 0))


def test_what_is_prepared_for_blocks_where_they_were_is_not_for_blocks_that_have_moved(tmp_path):
    cut, lost = ChunkAssignment(((0, 0), (0, 1))), frozenset({(0, 1), (1, 0)})
    watched = Watched(tmp_path).ask(CompileRequest(frozenset({(0, 1)}), cut=cut))
    watched.hear(Prepared(lost, None, ("single",), 1, 1.0))
    assert not watched.preparing.is_compiled((1, 0))
    watched.hear(Prepared(lost, None, ("single",), 1, 1.0, before=cut))
    assert watched.preparing.is_compiled((1, 0))


def test_it_is_known_whether_one_expert_rank_less_is_prepared(tmp_path):
    watched = Watched(tmp_path).ask(CompileRequest(frozenset(), 4))
    watched.hear(Prepared(frozenset(), 4, ("single",), 1, 1.0))
    assert not watched.preparing.is_compiled((0, 0))
    watched.hear(Prepared(frozenset(), 3, ("single",), 1, 1.0))
    assert watched.preparing.is_compiled((0, 0))
