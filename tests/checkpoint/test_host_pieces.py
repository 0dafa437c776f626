"""Pieces of a state that several hosts have: brought together by files, nothing missing, nothing damaged."""

import numpy as np
import pytest

from swift.checkpoint import checkpoint_steps, clean_up_saves, join_pieces
from swift.checkpoint.storage import Piece, Save, give_up, read_pieces, write_pieces
from tests.checkpoint.conftest import CLASSES, RANKS, STAGES

SAVE = Save(4, "5f0c")
HERE = ".step-00000004.5f0c.pieces.tmp"


def by_host(run, num_hosts, chosen):
    """The pieces of a state, one for each stage and rank, of which every host has some."""
    pieces = [[] for _ in range(num_hosts)]
    for name, array in (("step", run.state["step"]), *((f"master.{n}", a) for n, a in run.state["master"].items())):
        for stage in range(STAGES):
            for rank in range(RANKS if array.ndim > 1 else 1):
                index = (slice(stage, stage + 1), *((slice(None), slice(rank, rank + 1)) if array.ndim > 1 else ()))
                values = array[index]
                if name.endswith(".expert"):
                    values = values[:, :, :, chosen]
                pieces[(stage * RANKS + rank) % num_hosts].append(Piece(name, index, values))
    for name, array in run.state["moments"].items():
        values = array[:, :, :, chosen] if name == "expert" else array
        pieces[-1].append(Piece(f"moments.{name}", (slice(None), slice(None), slice(None)), values))
    return pieces


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("chosen", [list(range(CLASSES)), [2, 0]], ids=["all experts", "some"])
def test_the_pieces_of_all_hosts_are_the_snapshot(small_run, tmp_path, num_hosts, chosen):
    run = small_run().run(1)
    chosen_LK = np.tile(chosen, (run.split.num_layers, 1))
    for host, pieces in reversed(list(enumerate(by_host(run, num_hosts, chosen)))):
        write_pieces(tmp_path, SAVE, host, pieces)
    ours = join_pieces(run.split, read_pieces(tmp_path, SAVE, num_hosts), chosen_LK)
    theirs = run.split.host_snapshot(
        {"step": run.state["step"], "master": run.state["master"], "moments": run.state["moments"]}, chosen_LK
    )
    assert ours.dense.keys() >= {"step", "master.head", "moments.head"}
    for mine, expected in ((ours.dense, theirs.dense), (ours.blocks, theirs.blocks)):
        for name in expected:
            np.testing.assert_array_equal(mine[name], np.asarray(expected[name]))
    assert list(tmp_path.iterdir()) == []


def test_a_piece_that_is_missing_is_no_snapshot(small_run):
    run, chosen = small_run().run(1), list(range(CLASSES))
    pieces, chosen_LK = by_host(run, 1, chosen)[0], np.tile(chosen, (run.split.num_layers, 1))
    join_pieces(run.split, pieces, chosen_LK)
    for left_out in (0, len(pieces) // 2, len(pieces) - 1):
        with pytest.raises(OSError, match=f"not all of the state has come: {pieces[left_out].name}$"):
            join_pieces(run.split, pieces[:left_out] + pieces[left_out + 1 :], chosen_LK)


def test_a_host_whose_pieces_do_not_come_is_named(tmp_path):
    write_pieces(tmp_path, SAVE, 0, [Piece("step", (slice(0, 1),), np.array([4]))])
    (tmp_path / HERE / ".host-1.half.tmp").mkdir()
    with pytest.raises(OSError, match=r"host 1 has not written its pieces of iteration 4 in 0 s"):
        list(read_pieces(tmp_path, SAVE, 2, patience_s=0))
    assert checkpoint_steps(tmp_path) == []
    clean_up_saves(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "at"), [("values", 3), ("values", None), ("manifest.json", 80), ("manifest.json", None)]
)
def test_damage_to_a_piece_is_seen(tmp_path, file, at):
    """A byte that has changed, or a file that ends early."""
    pieces = [Piece("a", (slice(0, 2),), np.arange(2.0)), Piece("b", (slice(None),), np.arange(3))]
    write_pieces(tmp_path, SAVE, 0, pieces)
    path = tmp_path / HERE / "host-0" / file
    content = bytearray(path.read_bytes())
    if at is None:
        del content[-4:]
    else:
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match="is not as it was saved"):
        list(read_pieces(tmp_path, SAVE, 1))


def test_a_host_that_writes_again_replaces_its_pieces(tmp_path):
    for value in (1, 2):
        write_pieces(tmp_path, SAVE, 0, [Piece("a", (slice(0, 1),), np.array([value]))])
    ((_, _, values),) = read_pieces(tmp_path, SAVE, 1)
    assert values.tolist() == [2]


def test_a_save_that_is_repeated_waits_for_its_own_pieces(tmp_path):
    """The first attempt has left those of host 1; those of host 0 and of host 10 are none of its."""
    earlier = Save(SAVE.step, "0000")
    for host in (0, 1, 10):
        write_pieces(tmp_path, earlier, host, [Piece("a", (slice(0, 1),), np.array([host]))])
    write_pieces(tmp_path, SAVE, 0, [Piece("a", (slice(0, 1),), np.array([2]))])
    with pytest.raises(OSError, match="host 1 has not written its pieces of iteration 4 in 0 s"):
        list(read_pieces(tmp_path, SAVE, 2, patience_s=0))
    write_pieces(tmp_path, SAVE, 1, [Piece("a", (slice(1, 2),), np.array([3]))])
    assert sorted(path.name for path in (tmp_path / ".step-00000004.0000.pieces.tmp").iterdir()) == ["host-10"]
    assert [piece.values.tolist() for piece in read_pieces(tmp_path, SAVE, 2)] == [[2], [3]]


def test_a_host_that_gives_up_is_not_waited_for(tmp_path):
    write_pieces(tmp_path, SAVE, 0, [Piece("a", (slice(0, 1),), np.array([2]))])
    half = tmp_path / HERE / ".host-1.half.tmp"
    half.mkdir()
    give_up(tmp_path, SAVE, 1, "No space left on device")
    with pytest.raises(OSError, match="host 1 has not written its pieces of iteration 4: No space left on device"):
        list(read_pieces(tmp_path, SAVE, 2))
    write_pieces(tmp_path, Save(6, "5f0d"), 1, [])
    assert not half.exists(), "the next save needs the room"
