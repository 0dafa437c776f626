"""The server side of an input host: one process admits callers, and each worker process serves one caller at a time.

A worker that dies is restarted; meanwhile its caller produces the samples itself. Callers prove that they have the key:
a file that only its owner can read, the same on all machines (``find_key``). Requests and answers are frames: a length,
then the bytes. Each frame must be complete within a time limit.
"""

import json
import multiprocessing
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from swift.data.pipeline import Pipeline
from swift.data.remote_records import error_response, handle_request
from swift.data.sample_store import NoDigest, pipeline_facts
from swift.data.sources import DataError
from swift.elastic.transport.connections import Admission
from swift.errors import SettingError
from swift.files import read_regular, replace_file

_HEAD = struct.Struct("<I")
MOST_BYTES = 1 << 28
_LEAST_RATE = 1 << 23
"""Bytes per second of a frame below which a connection counts as broken."""

_TURN_S, _PAUSE_S = 0.1, 1.0
_FREE = b"f"
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""TCP keepalive: a caller whose machine is gone frees its worker after 10 s and 3 probes, 5 s apart."""
_STALL_S = 10.0
"""Seconds for a caller to complete or accept a frame; after that the worker serves another caller."""
BUSY = "all processes are busy"

_LEAST = 32
"""Minimum length of a key in characters: a shorter one could be guessed."""


class Ended(ConnectionError):
    """The other side closed the connection."""


def send_frame(connection: socket.socket, content: bytes, limit_s: float) -> None:
    """Sends a frame.

    Args:
        connection: socket of the connection; its timeout is changed, and not restored.
        content: content of the frame.
        limit_s: time limit for the whole frame, in addition to the time for its bytes at ``_LEAST_RATE``.

    Raises:
        TimeoutError: the other side does not accept the frame in time.
        OSError: the connection is broken.
    """
    if len(content) > MOST_BYTES:
        raise OSError(f"{len(content)} bytes are more than a frame may have")
    connection.settimeout(limit_s + len(content) / _LEAST_RATE)
    connection.sendall(_HEAD.pack(len(content)) + content)


def receive_frame(connection: socket.socket, limit_s: float) -> bytes:
    """Receives a frame.

    Args:
        connection: see ``send_frame``.
        limit_s: time limit until the frame begins, and again for the rest, in addition to the time for its bytes.

    Raises:
        TimeoutError: the frame is not complete in time, even if parts of it keep arriving.
        OSError: the connection ends before the frame does.
    """
    (size,) = _HEAD.unpack(receive_bytes(connection, _HEAD.size, limit_s))
    if size > MOST_BYTES:
        raise OSError(f"{size} bytes are more than a frame may have")
    return receive_bytes(connection, size, limit_s + size / _LEAST_RATE)


def receive_bytes(connection: socket.socket, size: int, limit_s: float) -> bytes:
    """Receives exactly ``size`` bytes within ``limit_s`` seconds in all; raises as ``receive_frame`` does."""
    received, deadline = bytearray(size), time.monotonic() + limit_s
    view = memoryview(received)
    while view:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        num = connection.recv_into(view)
        if not num:
            raise Ended("the connection has ended")
        view = view[num:]
    return bytes(received)


@dataclass
class _Worker:
    """A worker process that produces samples.

    Attributes:
        process: the process.
        link: socket to the process, which receives a caller's connection and sends a byte when it is free again.
        is_free: whether the process waits for a caller.
        started: start time in seconds, by the monotonic clock.
    """

    process: BaseProcess
    link: socket.socket
    is_free: bool
    started: float


def serve_input(
    listener: socket.socket,
    key: str,
    load: Callable[[], Sequence[Pipeline]],
    num_workers: int,
    report: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Serves callers that have the key, until ``is_over``.

    Args:
        listener: socket that listens for callers.
        key: key that callers must prove to have.
        load: returns the pipelines; must be picklable, since each worker process calls it.
        num_workers: number of worker processes.
        report: called with a line once all workers are ready, and when one is restarted after it died.
        is_over: whether to stop.
    """
    workers = [_started(load) for _ in range(num_workers)]

    def look() -> None:
        for index, worker in enumerate(workers):
            workers[index] = _seen(worker, load, report)

    def refusal(node: int, is_ready: bool) -> str | None:
        del node, is_ready
        look()  # a caller may be back at once, for the next source of a mixture
        return None if any(worker.is_free for worker in workers) else BUSY

    def admit(node: int, connection: socket.socket) -> None:
        del node
        with connection:
            worker = next(worker for worker in workers if worker.is_free)
            with suppress(OSError):  # the worker has died; the caller will notice
                socket.send_fds(worker.link, [_FREE], [connection.fileno()])
            worker.is_free = False

    admission, was_ready = Admission(listener, key, refusal, admit), False
    try:
        while not is_over():
            try:
                admission.turn(_TURN_S)
            except OSError:  # too many open files, for the moment
                time.sleep(_TURN_S)
            look()
            if not was_ready and all(worker.is_free for worker in workers):
                host, port = listener.getsockname()[:2]
                report(f"{host}:{port} is ready, with {num_workers} process{'es' if num_workers > 1 else ''}")
                was_ready = True
    finally:
        admission.close()
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.link.close()


def _seen(worker: _Worker, load: Callable[[], Sequence[Pipeline]], report: Callable[[str], None]) -> _Worker:
    """Updates whether a worker is free; restarts a dead one, at most once in ``_PAUSE_S`` seconds."""
    if not worker.process.is_alive():
        worker.is_free = False
        if time.monotonic() < worker.started + _PAUSE_S:
            return worker
        worker.link.close()
        report(f"a process has died ({worker.process.exitcode}) and is started again")
        return _started(load)
    if select.select([worker.link], [], [], 0)[0]:
        with suppress(OSError):
            worker.is_free = worker.link.recv(1) == _FREE
    return worker


def _started(load: Callable[[], Sequence[Pipeline]]) -> _Worker:
    parent_end, worker_end = socket.socketpair()
    with worker_end:
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(worker_end, load), daemon=True)
        process.start()
    return _Worker(process, parent_end, is_free=False, started=time.monotonic())


def _work(link: socket.socket, load: Callable[[], Sequence[Pipeline]]) -> None:
    """Serves one caller after the other in a worker process, until the admitting process is gone."""
    served = _Served(load)
    with suppress(OSError):
        link.sendall(_FREE)
        while True:
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                _serve(served, connection, link)
                link.sendall(_FREE)  # before the connection closes, since then the caller may call again


class _Served:
    """The pipelines of a worker, with their facts, which are computed once and not for every caller.

    Args:
        load: returns the pipelines, at least one.
    """

    def __init__(self, load: Callable[[], Sequence[Pipeline]]):
        self._load = load
        self._all = list(map(_with_facts, load()))

    def nearest(self, theirs: Mapping[str, str]) -> tuple[Pipeline, list[str]]:
        """Returns the pipeline that agrees with a caller's in most facts, and the names of the facts that differ.

        If a fact differs, this pipeline is loaded again and compared once more, since its files may have changed. The
        other pipelines of a mixture are not compared again, since that would take longer than a caller waits.
        """
        index, differing = self._compared(theirs)
        if differing:
            with suppress(SettingError, DataError, OSError):  # on failure the old pipeline stays, and differs
                self._all[index] = _with_facts(self._load()[index])
                index, differing = self._compared(theirs)
        return self._all[index][0], differing

    def _compared(self, theirs: Mapping[str, str]) -> tuple[int, list[str]]:
        compared = [[name for name in theirs if theirs[name] != facts.get(name)] for _, facts in self._all]
        index = min(range(len(compared)), key=lambda i: len(compared[i]))
        return index, compared[index]


def _with_facts(pipeline: Pipeline) -> tuple[Pipeline, dict[str, str]]:
    """Returns a pipeline with its facts, which are empty if it has no digest, so that it matches no caller."""
    with suppress(NoDigest):
        return pipeline, pipeline_facts(pipeline)
    return pipeline, {}


def _serve(served: _Served, connection: socket.socket, link: socket.socket) -> None:
    """Compares facts with a caller, then answers its requests until it closes the connection or stalls."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with suppress(OSError, ValueError, RecursionError):
        theirs = json.loads(receive_frame(connection, _STALL_S))
        if not isinstance(theirs, dict):
            return
        pipeline, differing = served.nearest(theirs)
        send_frame(connection, json.dumps(differing).encode(), _STALL_S)
        while True:
            ready = select.select([connection, link], [], [])[0]
            if link in ready:  # the admitting process is gone
                return
            answer = handle_request(pipeline, receive_frame(connection, _STALL_S))
            if len(answer) > MOST_BYTES:
                answer = error_response(f"it has {len(answer)} bytes, and {MOST_BYTES} can be sent")
            send_frame(connection, answer, _STALL_S)


def find_key(path: Path, *, makes: bool = False) -> str:
    """Reads the key from its file.

    Args:
        path: key file.
        makes: whether to create a new key if the file is missing.

    Raises:
        SettingError: the file is missing, others than its owner can read it, or its key is too short.
    """
    try:
        if makes and not path.exists():
            _make(path)
        if os.stat(path).st_mode & 0o077:
            raise SettingError("--key-file", str(path), "can be read by others than its owner: chmod 600 it")
        key = read_regular(path).decode(errors="replace").strip()
    except OSError as error:
        raise SettingError("--key-file", str(path), f"cannot be read: {error.strerror or error}") from error
    if len(key) < _LEAST:
        raise SettingError("--key-file", str(path), f"must hold a key of at least {_LEAST} characters")
    return key


def _make(path: Path) -> None:
    """Creates a key file; if several hosts do so at once on a shared disk, the first one wins and all read its key."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    replace_file(temporary, f"{secrets.token_hex(32)}\n".encode(), mode=0o600)
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
