"""Programs that a worker loads in a thread while it runs a generation."""

import threading
from types import SimpleNamespace

import pytest

from swift.elastic.membership.messages import Loaded, PreloadPrograms, RecutFailed
from swift.elastic.worker.generation import ProgramPreloader
from swift.pipeline.reconfigure.recut import UnknownAssignment
from swift.schedules.plans.normalize import ChunkAssignment

CUT, OTHER = ChunkAssignment(((0, 0), (0, 1))), ChunkAssignment(((0, 1), (0, 0)))
STEPS = SimpleNamespace()


class Loader(ProgramPreloader):
    """One that loads ``found`` once it may, and notes what it tells the supervisor."""

    def __init__(self, found="programs"):
        self.found, self.sent, self.may, self.is_loading = found, [], threading.Event(), threading.Event()
        super().__init__(None, None, 2, lambda kind, **fields: self.sent.append((kind, fields)))

    def _loaded(self, cut, steps, devices_RN):
        assert (steps, devices_RN) == (STEPS, "devices")
        self.is_loading.set()
        assert self.may.wait(20)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found, cut


@pytest.fixture
def loader():
    """A loader in the midst of a load for generation 3, which may end."""
    return loading("programs")


def loading(found):
    loader = Loader(found)
    loader.begin(3, STEPS, "devices")
    loader.load(PreloadPrograms(3, (), CUT))
    assert loader.is_loading.wait(20)
    assert loader.sent == []
    loader.may.set()
    return loader


def test_what_is_loaded_is_for_the_cut_and_is_given_once(loader):
    assert loader.end(CUT) == ("programs", CUT)
    assert loader.sent == [(Loaded, {"number": 3})]
    assert loader.end(CUT) is None


def test_programs_of_another_cut_are_dropped(loader):
    assert loader.end(OTHER) is None
    assert loader.end(CUT) is None


def test_the_generation_ends_once_nothing_is_loaded_on_its_devices():
    loader, ended = Loader(), []
    loader.begin(3, STEPS, "devices")
    loader.load(PreloadPrograms(3, (), CUT))
    assert loader.is_loading.wait(20)
    ending = threading.Thread(target=lambda: ended.append(loader.end(())))
    ending.start()
    ending.join(0.2)
    assert ended == []
    loader.may.set()
    ending.join(20)
    assert ended == [None]


def test_nothing_is_loaded_without_devices():
    """A command may come before its generation runs here, or after it has ended."""
    loader = Loader()
    loader.load(PreloadPrograms(3, (), CUT))
    loader.begin(3, STEPS, "devices")
    loader.load(PreloadPrograms(2, (), CUT))
    assert loader.end(CUT) is None
    loader.load(PreloadPrograms(3, (), CUT))
    assert loader.end(CUT) is None
    assert not loader.is_loading.is_set()


def test_a_failure_to_load_is_left_to_the_next_generation_and_an_unknown_cut_is_refused(capsys):
    loader = loading(ValueError("damaged"))
    assert loader.end(CUT) is None
    assert loader.sent == [(Loaded, {"number": 3})]
    assert "could not load programs ahead: damaged" in capsys.readouterr().err
    loader = loading(UnknownAssignment("another plan"))
    assert loader.end(CUT) is None
    assert loader.sent == [(RecutFailed, {"number": 3, "reason": "another plan"})]
