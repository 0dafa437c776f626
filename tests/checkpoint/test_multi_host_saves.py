"""A checkpoint that several hosts write together, a thread each: the files of one host, and nothing else."""

import errno
import json
import os
import secrets
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from swift.checkpoint import array_files, multi_host_save
from swift.checkpoint import manifest as digests
from swift.checkpoint.array_files import write_arrays
from swift.checkpoint.manifest import checkpoint_steps, clean_up_saves, temporary_path
from swift.checkpoint.multi_host_save import HostFailed, HostSave, HostShard, InvalidState, Save, SaveNotes
from swift.checkpoint.reader import load_plan, plan_restore
from swift.checkpoint.snapshots import assemble_snapshot
from swift.checkpoint.writer import save_checkpoint
from tests.checkpoint.conftest import CLASSES, IDENTITY, RANKS, STAGES

SAVE = Save(4, "5f0c")
ALL, SOME = list(range(CLASSES)), [2, 0]


def by_host(run, num_hosts, chosen):
    """The pieces of a state, for each stage and rank; more than four hosts, or three, divide the last dim."""
    pieces, per_part = [[] for _ in range(num_hosts)], -(-num_hosts // (STAGES * RANKS))
    for index, array in enumerate(run.state["step"]):
        pieces[index % num_hosts].append(HostShard("step", (slice(index, index + 1),), array[None]))
    for group in ("master", "moments"):
        for name, array in run.state[group].items():
            for number, (stage, rank, part) in enumerate(np.ndindex(STAGES, RANKS, per_part)):
                width = array.shape[-1]
                last = slice(width * part // per_part, width * (part + 1) // per_part)
                here = slice(stage, stage + 1), slice(None), slice(rank, rank + 1), slice(None), last
                is_part = name == "expert" and chosen != ALL
                values = array[here][:, :, :, chosen] if is_part else array[here]
                pieces[number % num_hosts].append(HostShard(f"{group}.{name}", here, values))
    return pieces


def saves(run, num_hosts, chosen=ALL):
    """The save of each host, and the pieces that it has."""
    chosen_LK, save = np.tile(chosen, (run.split.num_layers, 1)), Save(4, secrets.token_hex(4))
    hosts = [HostSave(run.directory, save, own, num_hosts, run.split, chosen_LK) for own in range(num_hosts)]
    return list(zip(hosts, by_host(run, num_hosts, chosen), strict=True))


def facts(run, **changes):
    """Facts that the first host needs for a manifest, as ``SmallRun.save`` has it."""
    known = {"ledger": run.ledger, "identity": IDENTITY, "extra": {"next": run.step}}
    return known | {"num_kept": run.config.num_kept} | changes


def save_together(run, hosts, each=lambda save, pieces: save.write(pieces)):
    """Saves with a thread for each host; returns the manifest and the bytes of hosts, or raises the first's error."""
    hosts = saves(run, hosts) if isinstance(hosts, int) else hosts

    def of_host(save, pieces):
        try:
            save.wait() if save.host_index else save.begin(write_arrays)
            each(save, pieces)
            return save.commit(**facts(run)) if save.host_index == 0 else None
        except Exception as error:
            save.board.give_up(error)
            raise

    with ThreadPoolExecutor(len(hosts)) as threads:
        ends = [threads.submit(of_host, *one) for one in hosts]
        for end in ends[1:]:
            end.exception()
        return ends[0].result()


def contents(directory):
    """All files of a checkpoint, but for those that hold the time or place of writing, and the digests of those."""
    found = {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    own = {path for path in found if path.name in ("_CHECKPOINT_METADATA", "commit_success.txt")}
    fields = json.loads(found.pop(Path("manifest.json")).partition(b"\n")[2])
    for path in own:
        for files in fields["common"].values():
            files.pop(path.as_posix(), None)
    return {path: content for path, content in found.items() if path not in own}, fields, own


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chosen", [ALL, SOME], ids=["all experts", "some"])
def test_hosts_together_write_the_files_of_one(small_run, num_hosts, chosen):
    """Byte for byte, Orbax's own files and the manifest too: nobody can tell how many hosts there were."""
    run = small_run().run(3)
    chosen_LK = np.tile(chosen, (run.split.num_layers, 1))
    manifest, bytes_of_hosts = save_together(run, saves(run, num_hosts, chosen))
    assert sum(bytes_of_hosts) == manifest.num_bytes
    assert sorted(path.name for path in run.directory.iterdir()) == ["step-00000002", "step-00000004"]
    state = load_plan(run.directory, plan_restore(run.directory, IDENTITY), run.split)
    if chosen == ALL:
        jax.tree.map(np.testing.assert_array_equal, state, run.state)
    ours = contents(run.directory / "step-00000004")
    snapshot = run.split.host_snapshot(run.state, chosen_LK)
    save_checkpoint(run.directory, 4, snapshot, run.split, **facts(run))
    assert ours == contents(run.directory / "step-00000004")


def own_io(which):
    """The bytes that this thread has read or written, as the system counts them."""
    return int(dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())[which])


@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_a_host_writes_its_share_and_reads_an_equal_part(small_run, num_hosts):
    run, measured = small_run(size=10_000).run(3), {}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))

    def each(save, pieces):
        before = own_io("wchar"), own_io("rchar")
        save.write(pieces)
        measured[save.host_index] = own_io("wchar") - before[0], own_io("rchar") - before[1]

    _, bytes_of_hosts = save_together(run, num_hosts, each)
    for own in range(num_hosts):
        assert bytes_of_hosts[own] == pytest.approx(total / num_hosts, rel=0.05)
        assert measured[own] == pytest.approx((total / num_hosts, total / num_hosts), rel=0.05)


def test_no_host_needs_memory_for_the_state(small_run):
    """Beyond its pieces, a host has an expert of a layer in memory at most, and a megabyte to read its files again."""
    run = small_run(size=200_000).run(3)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))
    of_expert, hosts = total / (run.split.num_layers * CLASSES), saves(run, 4)
    tracemalloc.start()
    try:
        save_together(run, hosts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1.1 * of_expert < 0.3 * total


def test_a_piece_that_is_missing_is_no_checkpoint(small_run):
    run = small_run().run(3)
    pieces = by_host(run, 1, ALL)[0]

    def each(save, mine):
        save.write([piece for piece in mine if (piece.name, piece.place) != lacking])

    for left_out in (0, len(pieces) // 2, len(pieces) - 1):
        name = pieces[left_out].name
        lacking = name, pieces[left_out].place
        said = name if not name.endswith(".expert") else "expert.*"
        with pytest.raises(OSError, match=f"not all of the state has come: {said}"):
            save_together(run, 2, each)
        rest = pieces[:left_out] + pieces[left_out + 1 :]
        with pytest.raises(OSError, match=f"not all of the state has come: {name}$"):
            assemble_snapshot(run.split, rest, np.tile(ALL, (run.split.num_layers, 1)))
    assert checkpoint_steps(run.directory) == [2]


@pytest.mark.parametrize("name", ["master.head", "step", "expert.1.2.float32", "expert.3.0.float64"])
def test_what_was_not_written_as_it_is_in_memory_is_not_a_checkpoint(small_run, monkeypatch, name):
    run, writing_parts = small_run(num_kept=1).run(3), multi_host_save.writing_parts
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}

    @contextmanager
    def spoil(arrays, one, progress):
        with writing_parts(arrays, one, progress) as write:
            yield lambda place, values: write(place, values + 1 if one == name else values)

    monkeypatch.setattr(multi_host_save, "writing_parts", spoil)
    with pytest.raises(OSError, match=f"the values of {name.replace('.', '[.]')} are not those that host . has saved"):
        save_together(run, 2)
    clean_up_saves(run.directory)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before


def test_a_host_opens_each_file_once_and_for_writing_alone(small_run, monkeypatch):
    run, opened, really = small_run().run(3), Counter(), os.open

    def noted(path, flags, *rest, **more):
        if flags & os.O_ACCMODE:
            opened[threading.get_ident(), os.fspath(path), flags & os.O_ACCMODE] += 1
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(array_files.os, "open", noted)
    save_together(run, 2)
    of_values = {key: count for key, count in opened.items() if "/arrays/" in key[1]}
    assert len({thread for thread, *_ in of_values}) == 2
    assert {(flags, count) for (*_, flags), count in of_values.items()} == {(os.O_WRONLY, 1)}


def test_a_host_that_fails_is_told_and_costs_nothing_that_was_there(small_run):
    run = small_run().run(3)

    def each(save, pieces):
        if save.host_index == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save.write(pieces)

    with pytest.raises(HostFailed, match=r"host 2 has not written its part of iteration 4: .*No space left on device"):
        save_together(run, 4, each)
    assert checkpoint_steps(run.directory) == [2]
    save_together(run, 4)
    assert checkpoint_steps(run.directory) == [2, 4]
    assert [path.name for path in run.directory.iterdir() if path.name.startswith(".")] == []


def test_values_that_are_not_finite_on_one_host_are_told_to_all(small_run):
    run, heard = small_run().run(3), []

    def each(save, pieces):
        if save.host_index == 1:
            raise InvalidState("its values are not finite")
        try:
            save.write(pieces)
        except InvalidState as error:
            heard.append(str(error))
            raise

    with pytest.raises(InvalidState):
        save_together(run, 3, each)
    assert heard == ["host 1 has not written its part of iteration 4: its values are not finite"] * 2


def test_a_silent_host_is_named_and_one_that_makes_progress_is_awaited(tmp_path):
    host, other = (SaveNotes(tmp_path, SAVE, own, patience_s=0.5) for own in range(2))
    with pytest.raises(TimeoutError, match=r"host 1 has not written its part of iteration 4 in 0\.5 s"):
        host.read(1, "filled")
    with ThreadPoolExecutor(1) as thread:
        awaited = thread.submit(host.read, 1, "filled")
        for _ in range(4):
            other.sign()
            other._signed_at = -9.0
            threading.Event().wait(0.3)
        other.post("filled", {"places": []})
        assert awaited.result()["places"] == []
    clean_up_saves(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", ["array_files", "digests", "multi_host_save"])
def test_large_arrays_give_signs_of_progress_before_they_are_through(small_run, monkeypatch, shared):
    """Writing, taking digests and comparing, of a hundred bytes at a time."""
    signs = [0, 0]
    for nth, length in enumerate((1 << 26, 100)):
        monkeypatch.setattr(digests, "_READ", length if shared == "digests" else 1 << 20)
        for module in (array_files, multi_host_save):
            is_small = module.__name__.endswith(shared)
            monkeypatch.setattr(module, "BLOCK", length if is_small else 1 << 26)
        monkeypatch.setattr(SaveNotes, "sign", lambda _, nth=nth: signs.__setitem__(nth, signs[nth] + 1))
        save_together(small_run(size=1000).run(3), 2)
    assert signs[1] > signs[0] + 100


def test_a_second_attempt_to_begin_keeps_what_hosts_have_told(small_run):
    """One that has given up meanwhile is heard at once, and signs that grow anew are signs."""
    (first, _), (second, _) = saves(small_run().run(3), 2)
    for _ in range(3):
        first.board.sign()
        first.board._signed_at = -1e9
    second.board.give_up(OSError("no memory"))
    first.begin(write_arrays)
    with pytest.raises(HostFailed, match="no memory"):
        first.board.read(1, "filled")


def test_signs_that_begin_anew_are_signs(tmp_path):
    board, other = (SaveNotes(tmp_path, SAVE, own, patience_s=1.0) for own in range(2))
    signs = tmp_path / ".step-00000004.5f0c.hosts.tmp" / "host-1.signs"
    other.sign()
    signs.write_bytes(b"." * 100)

    def begins_anew():
        for count in (1, 2, 3):
            time.sleep(0.6)
            signs.write_bytes(b"." * count)
        other.post("filled", {})

    thread = threading.Thread(target=begins_anew)
    thread.start()
    assert board.read(1, "filled")
    thread.join()


@pytest.mark.parametrize("at", [3, -4], ids=["begins", "ends"])
def test_damage_to_what_a_host_tells_is_seen(tmp_path, at):
    host, other = (SaveNotes(tmp_path, SAVE, own) for own in range(2))
    other.post("checked", {"files": {}})
    (path,) = tmp_path.glob(".step*/host-1.checked")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"is damaged: its file host-1\.checked is not as it was saved"):
        host.read(1, "checked")


def test_an_earlier_attempt_of_a_save_tells_nothing(tmp_path):
    """Host 1 had done its part in it."""
    SaveNotes(tmp_path, Save(4, "0000"), 1).post("filled", {})
    with pytest.raises(TimeoutError):
        SaveNotes(tmp_path, SAVE, 0, patience_s=0).read(1, "filled")


def test_a_disk_without_room_is_not_filled(small_run, monkeypatch):
    run = small_run(size=10_000).run(3)
    (save, _), *_ = saves(run, 2)
    room = [*os.statvfs(run.directory)]
    room[4] = 0  # f_bavail
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result(room))
        with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed, 0 are free"):
            save.begin(write_arrays)
    assert not temporary_path(run.directory, 4).exists()
    save.begin(write_arrays)
    assert temporary_path(run.directory, 4).exists()
