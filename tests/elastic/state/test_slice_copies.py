"""Copies of a rank's slices with another rank: the right ones, complete or not there at all, no more than needed."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.checkpoint.units import by_name
from swift.elastic.membership.messages import Process, StateId, processes_of
from swift.elastic.state.slices import SliceCopies, copy_shapes, needed, neighbour_of, neighbour_slices
from swift.mesh.per_rank import REPLICATED
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.saved_state import split_of

OWNER, HOLDER = Process((0, 0), 2), Process((0, 0), 3)
WRITERS = """
import os, sys
from pathlib import Path
import numpy as np
from swift.elastic.state.slices import SliceCopies
from swift.elastic.membership.messages import Process, StateId

def write(directory):
    keep = SliceCopies(directory).store(4, Process((0, 0), 3), Process((0, 0), 2))
    with directory.with_suffix(".said").open("w") as said:
        for step in range(10**6):
            keep.save(StateId(1, step), {"numbers": np.full(4_000_000, step)})
            keep.retain_only(frozenset({StateId(1, step), StateId(1, step - 1)}))
            print(step, file=said, flush=True)

for line in sys.stdin:
    child = os.fork()  # to import all this takes longer than to write
    if not child:
        write(Path(line.rstrip()))
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""A process for each directory that it is told, which writes copies of 32 MB, one after the other."""


@pytest.fixture
def writers():
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


def killed_while_it_copies(writers, directory, wait_s):
    """The steps of which a writer has said that they are complete."""
    said = directory.with_suffix(".said")
    writers.stdin.write(f"{directory}\n")
    writers.stdin.flush()
    writer = int(writers.stdout.readline())
    while not (said.exists() and said.read_text().startswith("0\n")):
        time.sleep(0.01)
    time.sleep(wait_s)
    while not list(directory.rglob(".state-*")):  # in the midst of one
        assert writers.poll() is None
    os.kill(writer, signal.SIGKILL)
    assert int(writers.stdout.readline()) == signal.SIGKILL
    return [int(step) for step in said.read_text().split()]


def test_a_copy_that_a_kill_breaks_off_is_never_taken_for_complete(writers, tmp_path):
    moment, is_half = random.Random(0), []
    for number in range(8):
        directory = tmp_path / str(number)
        directory.mkdir()
        said = killed_while_it_copies(writers, directory, moment.uniform(0.0, 0.2))
        is_half.append(bool(list(directory.rglob(".state-*"))))
        copies = SliceCopies(directory)
        found = {one.stamp for one in copies.find([HOLDER], [OWNER])}
        assert StateId(1, said[-1]) in found, "one that was complete is lost"
        for stamp in found:
            like = {"numbers": jax.ShapeDtypeStruct((4_000_000,), np.int64)}
            copy = copies.store(4, HOLDER, OWNER).load(stamp, like)
            assert (copy["numbers"] == stamp.step).all()
        copies.retain_only(HOLDER)
        assert [path for path in directory.rglob("*") if path.is_file()] == []
    assert any(is_half)


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.randoms(use_true_random=False), min_size=1, max_size=12))
def test_of_every_expert_the_newest_copy_is_kept_and_of_all_the_newest_two(num_classes, k, randoms):
    k = min(k, num_classes)
    chosen = {
        StateId(1, step): np.array([one.sample(range(num_classes), k) for _ in range(2)])
        for step, one in enumerate(randoms)
    }
    kept = needed(chosen, num_classes)
    assert set(sorted(chosen)[-2:]) <= kept
    for layer, class_ in np.ndindex(2, num_classes):
        having = [stamp for stamp, chosen_LK in chosen.items() if class_ in chosen_LK[layer]]
        assert not having or max(having) in kept
    assert len(kept) <= 2 + 2 * num_classes


@pytest.fixture
def spec(two_ranks):
    """A step spec of three ranks, with a state in which no two numbers are equal."""
    return make_step_spec(replace(two_ranks, topology=Topology(1, 1, 3), sequences_per_microbatch=3))


def drawn(spec):
    def draw(leaf):
        return np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)

    return spec.live.put(jax.tree.map(draw, spec.abstract()), spec.specs)


@pytest.mark.parametrize("k", [4, 2])
def test_every_rank_gets_the_slices_of_the_one_before_it(spec, k):
    state, split = drawn(spec), split_of(spec)
    arrays, like = by_name(state), copy_shapes(split, k)
    chosen_LK = np.array([[3, 0, 1, 2], [1, 2, 0, 3]], np.int32)[:, :k]
    given = [{name: arrays[name] for name in like[kind]} for kind in ("dense", "experts")]
    chosen = spec.live.put(chosen_LK, REPLICATED)
    got = jax.device_get(neighbour_slices(spec)(*given, chosen))
    assert sorted(got["experts"]) == sorted(split.expert_names)
    assert sorted(got["dense"]) == sorted(name for name in split.dense_shapes if name in split.ranked_names)
    for rank in range(3):
        for name, array in got["dense"].items():
            np.testing.assert_array_equal(array[:, :, (rank + 1) % 3], np.asarray(arrays[name])[:, :, rank])
            assert array[:, :, :1].shape == like["dense"][name].shape
        for name, array in got["experts"].items():
            mine = np.asarray(arrays[name])[0, :, rank]
            wanted = np.stack([mine[layer, chosen_LK[layer]] for layer in range(2)])
            np.testing.assert_array_equal(array[0, :, (rank + 1) % 3], wanted)
            assert array[:, :, :1].shape == like["experts"][name].shape


def test_the_ring_has_every_rank_once():
    ring = processes_of(Topology(1, 1, 5), by_rank=True)[::2]
    assert sorted(neighbour_of(process, ring) for process in ring) == sorted(ring)
    assert all(neighbour_of(process, ring) != process for process in ring)
