"""The reads of one of several hosts from a checkpoint: all of its share, and no other bytes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from swift.checkpoint.array_files import data_file, files_of, read_part
from swift.checkpoint.arrays import Verifier
from swift.checkpoint.reader import load_plan, load_share, plan_restore
from swift.errors import SettingError
from tests.checkpoint.conftest import IDENTITY, RANKS, STAGES

EVERYTHING = dict.fromkeys(range(STAGES), slice(RANKS))


def shares(num_hosts):
    """Shares of as many hosts: all, a stage each, or one rank of a stage, which two hosts have if there are eight."""
    if num_hosts == 1:
        return [EVERYTHING]
    if num_hosts == 2:
        return [{stage: slice(RANKS)} for stage in range(STAGES)]
    return [{s: slice(r, r + 1)} for s in range(STAGES) for r in range(RANKS)] * (num_hosts // 4)


def bytes_read(function):
    """The bytes that this process reads from files meanwhile, as the system counts them, and what is returned."""

    def count():
        return int(Path("/proc/self/io").read_text().split()[1])

    of_counting = -count() + count()
    before = count()
    result = function()
    return count() - before - of_counting, result


def held(state, share):
    """The values of a share, array by array."""
    for stage, ranks in share.items():
        yield state["step"][stage]
        for group in ("master", "moments"):
            yield from (leaf[stage, :, ranks] for leaf in state[group].values())


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_every_host_reads_its_share_bit_for_bit(small_run, num_hosts):
    run = small_run(experts_per_layer=1, num_kept=9).run(7)
    plan = plan_restore(run.directory, IDENTITY)
    assert len({copy.step for copy in plan.sources.values()}) > 1
    whole = load_plan(run.directory, plan, run.split)
    for share in shares(num_hosts):
        state = load_share(run.directory, plan, run.split, share)
        for ours, theirs in zip(held(state, share), held(whole, share), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        others = {stage: ranks for stage, ranks in EVERYTHING.items() if stage not in share}
        assert not any(np.any(values) for values in held(state, others))


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_the_bytes_that_a_host_reads_are_its_share(small_run, num_hosts):
    """It reads the values that its devices hold, and verifies an equal part of the files."""
    run = small_run(size=10_000).run(2)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))
    plan = plan_restore(run.directory, IDENTITY)
    for own, share in enumerate(shares(num_hosts)):
        loaded, _ = bytes_read(lambda share=share: load_share(run.directory, plan, run.split, share))
        assert loaded == pytest.approx(total / min(num_hosts, STAGES * RANKS), rel=0.05)
        checker = Verifier(run.directory)
        verified, _ = bytes_read(
            lambda own=own, checker=checker: checker.check_equal_part(plan.manifest, own, num_hosts)
        )
        assert verified == pytest.approx(total / num_hosts, rel=0.05)


def test_what_hosts_have_checked_nobody_reads_again(small_run):
    run = small_run(size=10_000).run(4)
    manifest, checker = plan_restore(run.directory, IDENTITY).manifest, Verifier(run.directory)
    for own in range(3):
        checker.adopt(Verifier(run.directory).check_equal_part(manifest, own, 3))
    read, plan = bytes_read(lambda: plan_restore(run.directory, IDENTITY, checker=checker))
    assert plan.step == 4
    assert read < 0.05 * sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))


@pytest.mark.parametrize(("name", "step"), [("expert.1.2.float32", 4), ("master.head", 2)])
def test_damage_that_one_host_finds_all_pass_over(small_run, name, step):
    run = small_run().run(4)
    manifest = plan_restore(run.directory, IDENTITY).manifest
    file = data_of(run, name)
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    found = [Verifier(run.directory).check_equal_part(manifest, own, 4) for own in range(4)]
    assert sum(any(reason for *_, reason in of_host) for of_host in found) == 1
    checker = Verifier(run.directory)
    for of_host in found:
        checker.adopt(of_host)
    file.write_bytes(b"")  # whoever looks again is told something else
    plan = plan_restore(run.directory, IDENTITY, checker=checker)
    assert plan.step == step
    assert "is not as it was saved" in plan.passed_over[0]
    assert plan.sources[1, 2].step == 2


def test_files_that_end_early_are_told(small_run):
    run = small_run().run(4)
    plan = plan_restore(run.directory, IDENTITY)
    file = data_of(run, "expert.1.2.float32")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SettingError, match="has changed while it was read"):
        load_share(run.directory, plan, run.split, EVERYTHING)


def data_of(run, name):
    """The file with the values of an array of the newest checkpoint."""
    (file,) = (run.directory / f"step-{run.step:08d}" / "arrays" / "state" / name).glob("[0-9]*")
    return file


@pytest.mark.slow
def test_a_part_of_more_than_a_system_call_reads(tmp_path):
    """A file with a hole, so that nobody has to write it."""
    num_bytes, array = (1 << 31) + 4096, tmp_path / files_of("large")
    array.mkdir(parents=True)
    header = {"shape": [1, num_bytes], "chunks": [1, num_bytes], "dtype": "|u1", "order": "C"}
    (array / ".zarray").write_text(json.dumps(header | {"compressor": None, "filters": None}))
    with (tmp_path / data_file(tmp_path, "large")).open("wb") as file:
        file.truncate(num_bytes - 1)
        file.seek(0, 2)
        file.write(b"\7")
    values = read_part(tmp_path, "large", (slice(0, 1),))
    assert (values.shape, int(values[0, -1])) == ((1, num_bytes), 7)
