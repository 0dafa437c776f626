"""Rows between ranks, in rounds and all at once, against NumPy; and where which of the two is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

from swift.experts.capacity.token_exchange import Ends, exchange_rows, is_ragged
from swift.experts.config import Buffers

pytestmark = pytest.mark.usefixtures("strict_types")

N, D = 4, 3
RANKS = PartitionSpec("ranks")
COUNTS = {
    "even": np.full((N, N), 2),
    "none": np.zeros((N, N), int),
    "one pair of ranks": np.diag([0, 0, 9], k=1),
    "own rows alone": np.diag([3, 0, 5, 1]),
    "all to one": np.outer(np.arange(1, N + 1), np.eye(N, dtype=int)[2]),
    "uneven": np.array([[0, 7, 0, 1], [3, 0, 0, 0], [0, 0, 6, 2], [1, 5, 0, 0]]),
}


def shuffled(counts_NN, num_rows, random):
    """Ends of every rank's rows in any order, with empty ones among them: (peer, position), int32[N, X] each."""
    found = []
    for counts_N in counts_NN:
        rows = [(peer, position) for peer, count in enumerate(counts_N) for position in range(count)]
        rows += [(0, -1)] * (num_rows - len(rows))
        found.append([rows[i] for i in random.permutation(num_rows)])
    return Ends(*np.moveaxis(np.array(found, np.int32), 2, 0))


def moved(rows_NXD, mine, theirs):
    """The rows of all ranks at their other ends, one at a time."""
    there_NYD = np.zeros((*theirs.peer_X.shape, D), rows_NXD.dtype)
    where = {}
    for rank, (peers, positions) in enumerate(zip(*mine, strict=True)):
        where |= {
            (rank, peer, position): (rank, row)
            for row, (peer, position) in enumerate(zip(peers, positions, strict=True))
        }
    for rank, (peers, positions) in enumerate(zip(*theirs, strict=True)):
        for row, (peer, position) in enumerate(zip(peers, positions, strict=True)):
            if position >= 0:
                there_NYD[rank, row] = rows_NXD[where[peer, rank, position]]
    return there_NYD


def check(counts_NN, buffers, check_vma):
    random = np.random.default_rng(0)
    mine, theirs = shuffled(counts_NN, 12, random), shuffled(counts_NN.T, 15, random)
    rows_NXD, d_NYD = (random.standard_normal((N, rows, D)).astype(np.float32) for rows in (12, 15))

    def of_rank(rows_1XD, d_1YD, mine, theirs):
        ends = [Ends(*(leaf[0] for leaf in one)) for one in (mine, theirs)]
        counts = jnp.asarray(counts_NN, jnp.int32)
        there, back = jax.vjp(lambda rows: exchange_rows(rows, *ends, counts, buffers, "ranks"), rows_1XD[0])
        return there[None], back(d_1YD[0])[0][None]

    run = jax.shard_map(
        of_rank, mesh=Mesh(jax.devices()[:N], ("ranks",)), in_specs=RANKS, out_specs=RANKS, check_vma=check_vma
    )
    there_NYD, d_NXD = jax.jit(run)(rows_NXD, d_NYD, mine, theirs)
    np.testing.assert_array_equal(there_NYD, moved(rows_NXD, mine, theirs))
    np.testing.assert_array_equal(d_NXD, moved(d_NYD, theirs, mine))


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("counts_NN", COUNTS.values(), ids=COUNTS)
def test_rows_arrive_at_their_other_ends_all_at_once(counts_NN):
    check(counts_NN, Buffers(1, None), check_vma=True)


@pytest.mark.parametrize("num_here", [12, 15])
def test_an_only_rank_moves_its_rows_without_a_collective(num_here):
    counts_NN, random = np.full((1, 1), 9), np.random.default_rng(0)
    (mine, theirs), num_there = (shuffled(counts_NN, rows, random) for rows in (num_here, 13)), 13
    rows_XD = random.standard_normal((num_here, D)).astype(np.float32)
    d_YD = random.standard_normal((num_there, D)).astype(np.float32)

    def run(rows_XD, d_YD):
        ends = [Ends(*(leaf[0] for leaf in one)) for one in (mine, theirs)]
        counts = jnp.asarray(counts_NN, jnp.int32)
        there, back = jax.vjp(lambda rows: exchange_rows(rows, *ends, counts, Buffers(3, 2), "ranks"), rows_XD)
        return there, *back(d_YD)

    there_YD, d_XD = jax.jit(run)(rows_XD, d_YD)  # outside of a mesh there is no axis to communicate over
    np.testing.assert_array_equal(there_YD, moved(rows_XD[None], mine, theirs)[0])
    np.testing.assert_array_equal(d_XD, moved(d_YD[None], theirs, mine)[0])


@pytest.mark.parametrize("counts_NN", COUNTS.values(), ids=COUNTS)
def test_rows_arrive_at_their_other_ends_in_rounds(counts_NN):
    check(counts_NN, Buffers(3, 2), check_vma=True)


@pytest.mark.parametrize(("kind", "platform", "is_there"), [("cpu", "cpu", False), ("H100", "gpu", True)])
def test_rows_go_all_at_once_where_devices_are_no_cpus(kind, platform, is_there):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (AxisType.Manual, AxisType.Manual)
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, N), ("others", "ranks"), types, abstract_device=device)):
        assert is_ragged("ranks") == is_there
        assert not is_ragged("virtual")  # ranks of one device, by ``vmap`` over this axis
    assert not is_ragged("ranks")
