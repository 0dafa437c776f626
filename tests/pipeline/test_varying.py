"""The walk finds collectives that not all devices come to, and no others; programs are traced, never compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

OWN = PartitionSpec("worker", "expert")
OF_RANK = PartitionSpec(None, "expert")
TABLE = PartitionSpec()
ARGUMENTS = {OWN: jnp.ones((2, 2)), OF_RANK: jnp.ones((1, 2)), TABLE: jnp.arange(3)}


@pytest.fixture
def find(ppermutes_in_varying_branches):
    """Findings in a function of x, which every device has its own part of, and of arguments of other specs."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("worker", "expert"))

    def find_in(function, *more_specs, axis="worker"):
        specs = (OWN, *more_specs)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=OWN, check_vma=False)
        jaxpr = jax.make_jaxpr(jax.jit(mapped))(*(ARGUMENTS[spec] for spec in specs))
        return ppermutes_in_varying_branches(jaxpr, axis)

    return find_in


def permute(x, axis="worker"):
    return lax.ppermute(x, axis, [(0, 1), (1, 0)])


def keep(x):
    return x


def branch(predicate, x, taken=permute):
    return lax.cond(predicate, taken, keep, x)


def is_second():
    return lax.axis_index("worker") > 0


def test_a_branch_by_the_own_index(find):
    (sentence,) = find(lambda x: branch(is_second(), x))
    assert sentence.startswith("ppermute over ['worker'] where ['worker'] differ")


def test_a_branch_by_own_data(find):
    assert len(find(lambda x: branch(x[0, 0] > 0, x))) == 1
    # Ranks alone differ: all workers' devices of some rank stay away.
    (sentence,) = find(lambda x, y: branch(y[0, 0] > 0, x), OF_RANK)
    assert sentence.startswith("ppermute over ['worker'] where ['expert'] differ")


def test_which_branch_was_taken_differs(find):
    """Although what either branch puts out is the same for all."""
    assert len(find(lambda x: branch(lax.cond(is_second(), lambda: 0, lambda: 1) > 0, x))) == 1


def test_a_switch_by_the_table(find):
    assert find(lambda x, table: lax.switch(table[0], [permute, keep], x), TABLE) == []
    assert len(find(lambda x, table: lax.switch(table[lax.axis_index("worker")], [permute, keep], x), TABLE)) == 1


def test_no_branch_at_all(find):
    assert find(lambda x: permute(x) + lax.axis_index("worker")) == []


@pytest.mark.parametrize("over", ["worker", "expert", ("worker", "expert")], ids=str)
def test_a_sum_over_all_axes_is_the_same_for_all(find, over):
    """x differs along both axes, so a sum over one of them is not enough."""
    found = find(lambda x: branch(lax.psum(x, over)[0, 0] > 0, x))
    assert len(found) == (0 if len(over) == 2 else 1)


def test_a_sum_within_groups_differs(find):
    """Even of what was the same for all: groups may be of different sizes."""

    def function(x, table):
        return branch(lax.psum(table, "worker", axis_index_groups=[[0], [1]])[0] > 0, x)

    assert len(find(function, TABLE)) == 1


def test_what_came_by_a_ppermute_differs(find):
    """Devices that receive nothing have zeros."""
    assert len(find(lambda x, table: branch(permute(table)[0] > 0, x), TABLE)) == 1


def nested(in_tick):
    """A function that runs ``in_tick`` (tick, x, table) in a call in a loop in a scan."""

    def function(x, table):
        tick = lambda t, x: jax.checkpoint(jax.jit(lambda x: in_tick(t, x, table)))(x)  # noqa: E731
        return lax.scan(lambda x, _: (lax.fori_loop(0, table[1], tick, x), None), x, None, length=2)[0]

    return function


def test_inside_loops_and_calls(find):
    assert len(find(nested(lambda _t, x, _table: branch(x[0, 0] > 0, x)), TABLE)) == 1
    assert find(nested(lambda t, x, table: lax.switch(table[t], [permute, keep], x)), TABLE) == []


def test_a_loop_inside_a_branch(find):
    assert len(find(lambda x: branch(is_second(), x, lambda x: lax.fori_loop(0, 2, lambda _, x: permute(x), x)))) == 1


def test_custom_derivatives(find):
    @jax.custom_vjp
    def held(x):
        return branch(x[0, 0] > 0, x)

    held.defvjp(lambda x: (held(x), None), lambda _, dy: (dy,))
    assert len(find(lambda x: held(x))) == 1


@pytest.mark.parametrize("where", ["body", "condition"])
def test_a_while_whose_rounds_differ(find, where):
    def more(x):
        return (permute(x) if where == "condition" else x)[0, 0] < 3

    step = permute if where == "body" else keep
    assert len(find(lambda x: lax.while_loop(more, lambda x: step(x) + 1, x))) == 1


def test_a_count_of_rounds_that_differ(find):
    """The rounds do the same for all, but there are not equally many."""

    def function(x):
        rounds, _ = lax.while_loop(lambda carry: carry[1][0, 0] < 3, lambda carry: (carry[0] + 1, carry[1]), (0, x))
        return branch(rounds > 1, x)

    assert len(find(function)) == 1


def test_a_while_by_the_table(find):
    def function(x, table):
        step = lambda carry: (carry[0] + 1, permute(carry[1]))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < table[1], step, (0, x))[1]

    assert find(function, TABLE) == []


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_carry_that_differs_only_after_some_rounds(find, loop):
    """The predicate is the table's at first, then what another carry was, then the own index."""

    def step(carry):
        x, predicate, following = carry
        return branch(predicate > 0, x), following, lax.axis_index("worker")

    def function(x, table):
        carry = (x, table[0], table[1])
        if loop == "scan":
            return lax.scan(lambda carry, _: (step(carry), None), carry, None, length=3)[0][0]
        return lax.fori_loop(0, table[2], lambda _, carry: step(carry), carry)[0]

    assert len(find(function, TABLE)) == 1


def test_other_collectives_wait_for_their_own_members(find):
    """A branch by workers may hold a sum over ranks, or over groups of workers, but none over all workers."""

    def function(over, groups=None):
        return lambda x: branch(is_second(), x, lambda x: lax.psum(x, over, axis_index_groups=groups))

    assert find(function("expert")) == find(function("expert"), axis="expert") == []
    assert find(function("worker", [[0], [1]])) == []
    assert len(find(function("worker"))) == 1


def test_a_ppermute_over_ranks_waits_for_workers_too(find):
    by_worker = lambda x: branch(is_second(), x, lambda x: permute(x, "expert"))  # noqa: E731
    assert len(find(by_worker, axis="expert")) == 1
