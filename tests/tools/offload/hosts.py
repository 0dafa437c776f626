"""An input host in this process, for tests."""

import multiprocessing
import socket
import threading
import time
from contextlib import contextmanager

from swift.tools.offload import serve_input

KEY = "a key of at least 32 characters, as it should be"


@contextmanager
def serving(load, num_workers: int):
    """The address of an input host with a pipeline, and what it says."""
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


def wait_for(happens) -> None:
    """Waits until something is so."""
    until = time.monotonic() + 300
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)
