"""Collectives on the links of a pod, by hand."""

import itertools

import pytest

from swift.mesh.hlo_collectives import Collective
from swift.pod_compile.costs import Interconnect
from swift.pod_compile.pods import Pod

MB = 10**6


def links(name: str) -> Interconnect:
    pod = Pod.parse(name)
    if pod.chip.platform == "gpu":
        return Interconnect(pod, list(itertools.product(*map(range, pod.shape))))
    return Interconnect(pod, [tuple(reversed(place)) for place in itertools.product(*map(range, reversed(pod.shape)))])


def test_a_message_to_a_neighbour_takes_its_link():
    one = Collective("collective-permute", 45 * MB, pairs=((0, 1), (4, 5)))
    assert links("v5e:4x4").seconds(one) == pytest.approx(1e-3 + 1e-6)


def test_messages_that_share_a_link_wait_for_each_other():
    # 0 -> 2 and 1 -> 2 both need the link from 1 to 2.
    one = Collective("collective-permute", 45 * MB, pairs=((0, 2), (1, 2)))
    assert links("v5e:4x4").seconds(one) == pytest.approx(2e-3 + 1e-6)


def test_only_a_closed_dim_has_a_way_round():
    # From one end to the other, and beside it: on a line the two share links.
    pairs = ((0, 3), (1, 3))
    line, ring = links("v5e:4x4"), links("v5p:4x4x4")
    one = Collective("collective-permute", 90 * MB, pairs=pairs)
    assert line.seconds(one) == pytest.approx(4e-3 + 1e-6)
    assert ring.seconds(one) == pytest.approx(1e-3 + 1e-6)


def test_all_reduce_is_reduce_scatter_and_all_gather():
    group = ((0, 1, 2, 3),)
    pod = links("v5p:4x4x4")
    gather, reduce = (pod.seconds(Collective(kind, 90 * MB, group)) for kind in ("all-gather", "all-reduce"))
    # 3/4 of the bytes pass every edge of the ring, half of them each way.
    assert gather == pytest.approx(0.375e-3 + 2e-6)
    assert reduce == pytest.approx(0.75e-3 + 4e-6)


def test_groups_of_one_exchange_nothing():
    assert links("v5e:4x4").seconds(Collective("all-reduce", MB, ((0,), (1,)))) == 0


def test_all_to_all_on_a_switch():
    # 7 of 8 shares leave, and as many come.
    one = Collective("all-to-all", 450 * MB, (tuple(range(8)),))
    assert links("h100:1x8").seconds(one) == pytest.approx(7 / 8 * 1e-3 + 5e-6)


def test_other_hosts_are_behind_the_network():
    near, far = (Collective("collective-permute", 50 * MB, pairs=pairs) for pairs in (((0, 1),), ((0, 8),)))
    gpus = links("h100:2x8")
    assert gpus.seconds(near) == pytest.approx(50 / 450 * 1e-3 + 5e-6)
    assert gpus.seconds(far) == pytest.approx(1e-3 + 5e-6)
