"""Input hosts in this process, for tests, and connections to them that are watched."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

from swift.data import corpus
from swift.data.sample_store import pipeline_facts
from swift.input import optimizer
from swift.input.client import connect
from swift.input.server import serve_input

KEY = "a key of at least 32 characters, as it should be"


@contextmanager
def serving(load, num_workers: int):
    """The address of an input host with the pipelines that are loaded, and what it says."""
    said, is_over = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        work = (listener, KEY, load, num_workers, said.append, is_over.is_set)
        thread = threading.Thread(target=serve_input, args=work)
        thread.start()
        try:
            wait_for(lambda: said)
            yield listener.getsockname(), said
        finally:
            is_over.set()
            thread.join()


def processes() -> list[int]:
    """The process ids of the host."""
    return sorted(one.pid for one in multiprocessing.active_children())


def lose(which: str) -> None:
    """Kills ``one`` or ``all`` processes of the host; those that are to be ``silent`` are stopped."""
    for pid in processes()[: 1 if which == "one" else None]:
        os.kill(pid, signal.SIGSTOP if which == "silent" else signal.SIGKILL)


def wait_for(happens) -> None:
    """Waits until something is so."""
    until = time.monotonic() + 300
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


def always_asked(monkeypatch) -> None:
    """Lets hosts begin records however few these are, and even where that takes longer."""
    monkeypatch.setattr(corpus, "_FEW", 1)
    monkeypatch.setattr(optimizer, "_OFFLOAD_GAIN", 0.0)
    monkeypatch.setattr(optimizer, "_OFFLOAD_LEAST_S", -1e9)


class Watched:
    """Hosts of which it is known what they were asked, and what happens before some request."""

    def __init__(self, hosts, happens):
        self.hosts, self.happens, self.num_answers = hosts, happens, 0
        self.tell = hosts.tell

    @property
    def num_workers(self) -> int:
        return self.hosts.num_workers

    def ask(self, request):
        if b'"number"' in request:
            self.happens(self.num_answers)
        answer = self.hosts.ask(request)
        self.num_answers += answer is not None and b'"number"' in request
        return answer


def connecting(address, happens=lambda _: None, key=KEY):
    """A way to connect to a host, and all that were connected."""
    found = []

    @contextmanager
    def connected(pipeline, report):
        hosts = connect([address], key, pipeline_facts(pipeline), report)
        found.append(Watched(hosts, happens))
        try:
            yield found[-1]
        finally:
            hosts.close()

    return connected, found


def content(path) -> dict:
    """Digests of the files of an index."""
    return {name: one["digest"] for name, one in json.loads((path / "index.json").read_text())["files"].items()}
