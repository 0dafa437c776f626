"""The lease of a run directory: the decision alone, the files, races of threads and of processes. No JAX."""

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import RunError, SettingError
from swift.runlog.lease import (
    BEAT_S,
    SILENCE_S,
    WATCH_S,
    LeaseObservation,
    Owner,
    ProcessTable,
    Verdict,
    acquire_lease,
    judge,
    process_is_there,
    this_process,
    writes_checkpoints,
)

HERE, THERE = ProcessTable("here", "boot", "pid:[1]"), ProcessTable("there", "boot", "pid:[1]")
OWNER = Owner(HERE, 7, 70, "2026-01-01T00:00:00+00:00", "token")
seconds = st.floats(-1e6, 1e6)
watches = st.builds(LeaseObservation, st.sampled_from([True, False, None]), st.booleans(), st.floats(0, 1e6), seconds)
places = st.sampled_from(
    [HERE, THERE, replace(HERE, boot="later"), replace(HERE, processes="pid:[2]"), replace(HERE, boot="")]
)
owners = st.none() | st.builds(replace, st.just(OWNER), place=places, started=st.sampled_from([70, None]))


@given(owners, places, watches)
def test_who_beats_or_is_there_is_never_taken_for_dead(owner, here, watch):
    verdict = judge(owner, here, watch)
    is_local = owner is not None and owner.place == here and here.is_known and owner.started is not None
    if is_local and watch.process_is_there is not None:
        assert verdict is (Verdict.LIVES if watch.process_is_there else Verdict.DEAD)
    elif watch.has_beaten:
        assert verdict is Verdict.LIVES
    else:
        assert verdict is not Verdict.LIVES
        # Whatever a clock says of the last heartbeat, two of them are waited for; and never longer than told.
        assert verdict is not Verdict.DEAD or watch.watched_s >= WATCH_S
        assert verdict is Verdict.DEAD or watch.watched_s < SILENCE_S


@given(owners, places, watches, st.floats(0, 1e6))
def test_a_longer_silence_never_brings_an_owner_back(owner, here, watch, longer):
    if judge(owner, here, watch) is Verdict.DEAD:
        assert judge(owner, here, replace(watch, watched_s=watch.watched_s + longer)) is Verdict.DEAD


@given(st.binary() | st.builds(lambda cut: OWNER.encode()[:cut], st.integers(0, len(OWNER.encode()) - 1)))
def test_what_is_no_lease_has_no_owner(content):
    assert Owner.decode(content) is None


def test_an_owner_is_read_as_it_was_written():
    assert Owner.decode(OWNER.encode()) == OWNER
    assert Owner.decode(replace(OWNER, started=None).encode()) == replace(OWNER, started=None)
    assert Owner.decode(OWNER.encode().replace(b'"version": 1', b'"version": 2')) is None
    assert Owner.decode(OWNER.encode().replace(b'"pid": 7', b'"pid": "7"')) is None


def test_a_process_is_known_by_its_number_and_its_start():
    own = this_process()
    assert own.place.is_known
    assert process_is_there(own)
    assert not process_is_there(replace(own, started=own.started - 1))
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not process_is_there(replace(own, pid=child.pid))
    child.wait()
    assert not process_is_there(replace(own, pid=child.pid))


class World:
    """A clock that goes only when somebody sleeps, and processes that are there or not."""

    def __init__(self):
        self.now, self.told, self.meanwhile = 0.0, [], lambda: None

    def sleep(self, duration_s):
        self.now += duration_s
        self.meanwhile()

    def acquire(self, path, owner, there=True):
        is_there = there if callable(there) else lambda _: there
        return acquire_lease(
            path, owner, report=self.told.append, is_there=is_there, clock=lambda: self.now, sleep=self.sleep
        )


def owner(token, place=HERE):
    return replace(OWNER, token=token, place=place)


def names(path):
    return sorted(one.name for one in path.iterdir())


def test_who_comes_second_is_told_who_is_there_and_writes_nothing(tmp_path):
    with World().acquire(tmp_path, owner("a")):
        before = names(tmp_path)
        with pytest.raises(SettingError) as refused:
            World().acquire(tmp_path, owner("b"))
        assert names(tmp_path) == before == [".lease-1.json"]
    line = str(refused.value)
    assert line.startswith(f"--run-dir = '{tmp_path}': belongs to process 7 on here since 2026-01-01T00:00:00+00:00 ")
    assert line.endswith("(heartbeat 0 s old): wait for it or end it")
    assert names(tmp_path) == []


def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path):
    world = World()
    lost = world.acquire(tmp_path, owner("a"))
    with world.acquire(tmp_path, owner("b"), there=False) as lease:
        assert (world.now, world.told, names(tmp_path)) == (0.0, [], [".lease-2.json"])
        lease.check()
        lost.renew()
        with pytest.raises(RunError, match="no longer belongs to this process: process 7 on here took it at 2026"):
            lost.check()
        assert names(tmp_path) == [".lease-2.json"]


@pytest.mark.parametrize(
    ("age_s", "waited_s"), [(0, SILENCE_S), (30, SILENCE_S - 30), (1e6, WATCH_S), (-1e6, SILENCE_S)]
)
def test_an_owner_elsewhere_is_followed_after_its_silence(tmp_path, age_s, waited_s):
    world = World()
    world.acquire(tmp_path, owner("a", THERE))
    then = time.time() - age_s
    os.utime(tmp_path / ".lease-1.json", (then, then))
    world.acquire(tmp_path, owner("b"))
    assert waited_s - 1 <= world.now <= waited_s + 1
    (line,) = world.told
    assert "has an owner, process 7 on there: waiting up to 60 s" in line


def test_an_owner_elsewhere_that_beats_is_found_at_its_next_heartbeat(tmp_path):
    world = World()
    lease = world.acquire(tmp_path, owner("a", THERE))
    world.meanwhile = lambda: lease.renew() if world.now % BEAT_S == 0 else None
    with pytest.raises(SettingError, match="belongs to process 7 on there"):
        world.acquire(tmp_path, owner("b"))
    assert world.now <= BEAT_S
    lease.check()


def test_who_wakes_while_it_is_followed_keeps_its_directory(tmp_path, monkeypatch):
    """The last heartbeat comes when the silence is over, and before the new lease is made."""
    world = World()
    lease = world.acquire(tmp_path, owner("a", THERE))
    made = []

    def fsync(_):
        if len(made) == 0:
            lease.renew()
        made.append(1)

    monkeypatch.setattr(os, "fsync", fsync)
    world.meanwhile = lambda: lease.renew() if made else None
    with pytest.raises(SettingError, match="belongs to"):
        world.acquire(tmp_path, owner("b"))
    assert (len(made), names(tmp_path)) == (1, [".lease-1.json"])
    lease.check()


def test_an_owner_that_has_slept_with_this_machine_keeps_its_directory(tmp_path, monkeypatch):
    """A lid is shut while one container watches the other: of the hours until it is opened neither knows."""
    now = {time.CLOCK_BOOTTIME: 0.0, time.CLOCK_MONOTONIC: 0.0}
    beats = []

    def sleep(duration_s):
        slept_s = 0 if beats else 10_000
        beats.append(tmp_path / ".lease-1.json")
        for clock, passed_s in ((time.CLOCK_BOOTTIME, duration_s + slept_s), (time.CLOCK_MONOTONIC, duration_s)):
            now[clock] += passed_s
        if len(beats) > 5:  # its next heartbeat
            os.utime(beats[0], (now[time.CLOCK_BOOTTIME],) * 2)

    monkeypatch.setattr("swift.runlog.lease.time.clock_gettime", now.get)
    monkeypatch.setattr("swift.runlog.lease.time.monotonic", lambda: now[time.CLOCK_MONOTONIC])
    acquire_lease(tmp_path, owner("a", THERE))
    with pytest.raises(SettingError, match="belongs to process 7 on there"):
        acquire_lease(tmp_path, owner("b"), sleep=sleep)


def test_an_owner_that_ends_while_it_is_watched_leaves_the_directory(tmp_path):
    world = World()
    lease = world.acquire(tmp_path, owner("a", THERE))
    world.meanwhile = lambda: lease.__exit__(None, None, None) if world.now == 2.0 else None
    lease.__enter__()
    with world.acquire(tmp_path, owner("b")):
        assert world.now == 2.0
        assert names(tmp_path) == [".lease-1.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_lease_is_one_of_somebody_elsewhere(tmp_path, content):
    (tmp_path / ".lease-4.json").write_bytes(content)
    world = World()
    world.acquire(tmp_path, owner("b"))
    assert SILENCE_S - 1 <= world.now <= SILENCE_S + 1
    assert names(tmp_path) == [".lease-5.json"]


def test_who_has_not_beaten_for_long_looks_before_it_writes(tmp_path):
    world = World()
    lost = world.acquire(tmp_path, owner("a"))
    world.acquire(tmp_path, owner("b"), there=False)
    lost.check()  # its thread has beaten just now, as far as it knows
    world.now = SILENCE_S - WATCH_S + 1
    lost.check(may_look=False)
    with pytest.raises(RunError, match="took it"):
        lost.check()


def test_the_lease_is_renewed_by_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("swift.runlog.lease.BEAT_S", 0.01)
    with acquire_lease(tmp_path) as lease:
        path = tmp_path / ".lease-1.json"
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        path.unlink()
        while lease._thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(RunError, match="its lease is gone"):
            lease.check()


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="cannot be written to: No such file"):
        acquire_lease(tmp_path / "gone")

    def is_full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(SettingError, match="cannot be written to: No space left on device"):
        acquire_lease(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("start", ["free", "dead", "elsewhere"])
def test_one_of_many_that_come_at_the_same_moment_gets_it(tmp_path, start):
    """And whoever it is may end at once, so that others begin while those before are still looking."""
    holders, most, rounds = [], [], threading.Barrier(8)
    guard = threading.Lock()

    def claim(number):
        world = World()
        for turn in range(25):
            rounds.wait()
            try:
                lease = world.acquire(tmp_path, owner(f"{number}-{turn}"), lambda one: one.token != "dead")
            except SettingError:
                continue
            with lease:
                with guard:
                    holders.append(number)
                    most.append(len(holders))
                lease.check()
                with guard:
                    holders.remove(number)
            lease.renew()

    if start != "free":
        acquire_lease(tmp_path, owner("dead", HERE if start == "dead" else THERE))
    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) >= 25  # of every round somebody got it
    assert max(most) == 1
    assert names(tmp_path) == []


CLAIM = """
import sys, time
from pathlib import Path
from swift.errors import SettingError
from swift.runlog.lease import acquire_lease
sys.stdin.readline()
try:
    lease = acquire_lease(Path(sys.argv[1]))
except SettingError as error:
    print("refused", error, flush=True)
else:
    print("has it", flush=True)
    time.sleep(60)
"""


def test_one_of_several_processes_follows_one_that_was_killed(tmp_path):
    def claim():
        return subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ends(process):
        process.kill()
        process.communicate()

    processes = [first, *others] = [claim() for _ in range(5)]
    try:
        print(file=first.stdin, flush=True)
        assert first.stdout.readline() == "has it\n"
        ends(first)
        for process in others:
            print(file=process.stdin, flush=True)
        said = [process.stdout.readline() for process in others]
        assert said.count("has it\n") == 1, said
        winner = others[said.index("has it\n")]
        assert all(f"process {winner.pid} on " in line for line in said if line != "has it\n"), said
    finally:
        for process in processes:
            ends(process)


def test_whoever_comes_after_waits_for_a_checkpoint_service_that_still_saves(tmp_path):
    world, service = World(), ExitStack()
    world.acquire(tmp_path, owner("a"))
    service.enter_context(writes_checkpoints(tmp_path))
    world.meanwhile = lambda: service.close() if world.now == 2.0 else None
    with world.acquire(tmp_path, owner("b"), there=False):
        assert world.now == 2.0
        assert names(tmp_path) == [".lease-2.json"]


def test_an_owner_that_is_suspended_with_its_checkpoint_service_goes_on_where_no_other_can(tmp_path):
    first, second = World(), World()
    with first.acquire(tmp_path, owner("a", THERE)) as lease, writes_checkpoints(tmp_path):
        with pytest.raises(SettingError, match="an earlier process is still writing a checkpoint, or is suspended"):
            second.acquire(tmp_path, owner("b"))
        assert second.now >= 60 + WATCH_S
        assert names(tmp_path) == [".lease-1.json"]
        lease.renew()
        lease.check()


def test_an_owner_that_wakes_while_its_checkpoint_service_is_waited_for_keeps_its_directory(tmp_path):
    world = World()
    lease = world.acquire(tmp_path, owner("a", THERE))
    world.meanwhile = lambda: lease.renew() if world.now > SILENCE_S + 5 else None
    with writes_checkpoints(tmp_path), pytest.raises(SettingError, match="belongs to process 7 on there"):
        world.acquire(tmp_path, owner("b"))
    assert names(tmp_path) == [".lease-1.json"]
    lease.check()


def test_no_two_write_checkpoints_at_a_time(tmp_path):
    service, order = ExitStack(), []
    service.enter_context(writes_checkpoints(tmp_path))
    threading.Timer(0.3, lambda: (order.append("the first ends"), service.close())).start()
    with writes_checkpoints(tmp_path):
        order.append("the second begins")
    assert order == ["the first ends", "the second begins"]
