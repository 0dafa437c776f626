"""A member that starts: what it does before it says that it is ready, and before an error ends it."""

import time
from types import SimpleNamespace

import jax
import pytest

from swift.elastic.accelerators import MemberDevices
from swift.elastic.membership.messages import Ready
from swift.elastic.worker.worker import WorkerProcess, WorkerSpec


class Reached(Exception):
    """The point up to which a test looks."""


def test_a_member_reads_its_data_up_to_where_the_run_is_before_it_is_ready():
    """Otherwise a generation that it joins would wait while a long stream is skipped."""
    done = []

    def send(kind, **_):
        done.append(kind)
        raise Reached

    member = object.__new__(WorkerProcess)  # without programs
    member._data = SimpleNamespace(skip_to=lambda step: done.append(step)), None
    member._worker_spec, member._channel = SimpleNamespace(), SimpleNamespace(send=send)
    with pytest.raises(Reached):
        member.run(40)
    assert done == [40, Ready]


@pytest.mark.parametrize(
    ("devices", "error", "waits"),
    [
        (MemberDevices("gpu", (0,)), jax.errors.JaxRuntimeError("NCCL: remote process exited"), True),
        (MemberDevices("gpu", (0,)), ValueError("a mistake"), False),
        (None, jax.errors.JaxRuntimeError("out of memory"), False),
    ],
)
def test_an_error_of_a_collective_ends_a_member_only_after_the_death_that_it_may_tell_of_is_found(
    monkeypatch, devices, error, waits
):
    slept = []

    def fail(_):
        raise error

    command = SimpleNamespace(form=SimpleNamespace(number=1))
    member = object.__new__(WorkerProcess)
    member._data = SimpleNamespace(skip_to=lambda _: None), None
    spec = WorkerSpec(experiment=None, process=None, by_rank=False, scratch=None, devices=devices)
    member._worker_spec, member._channel = spec, SimpleNamespace(send=lambda *_, **__: None)
    member._commands = SimpleNamespace(wait_to_form=lambda *_: command)
    monkeypatch.setattr(member, "_join_generation", fail)
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(type(error), match=str(error)):
        member.run(0)
    assert [seconds > 10 for seconds in slept] == [True] * waits
