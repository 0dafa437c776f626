"""Processes whose supervisor is gone."""

import os
import threading
from types import SimpleNamespace

import pytest

from swift.elastic.services import checkpoint_service
from swift.elastic.worker.worker import WorkerSpec


class Exited(BaseException):
    """Stands for the end of the process."""


def test_a_member_does_not_exit_before_what_all_shared_is_removed(monkeypatch):
    """Two threads find out that the supervisor is gone; the second one has nothing left to remove."""
    told, begun, may_end = list[str](), threading.Event(), threading.Event()

    def remove():
        if not begun.is_set():
            begun.set()
            assert may_end.wait(10)
            told.append("removed")

    def leave(_):
        told.append("exited")
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    part = WorkerSpec(experiment=None, process=None, by_rank=False, scratch=SimpleNamespace(remove=remove))

    def end():
        with pytest.raises(Exited):
            part.gone()

    threads = [threading.Thread(target=end) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert told == ["removed", "exited", "exited"]


@pytest.mark.parametrize("is_orphan", [True, False])
def test_the_checkpoint_service_removes_what_all_shared_if_its_supervisor_was_killed(monkeypatch, is_orphan):
    def leave(_):
        raise Exited

    told, parents = list[str](), [7, 7, 7]
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0) if parents else 1 if is_orphan else 7)
    monkeypatch.setattr(checkpoint_service, "_ORPHANED_S", 0.2)
    leaving = checkpoint_service.ServiceShutdown(SimpleNamespace(remove=lambda: told.append("removed")))
    with pytest.raises(Exited):
        leaving()
    assert told == ["removed"] * is_orphan
