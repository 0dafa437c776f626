"""Collectives in order: programs compute what they did, and on every path each collective waits for the one before.

A case is a per-rank function of three arrays: ``x_4`` float32[4], ``which`` int32[], the same in a worker and another
in every worker, and ``rounds`` int32[], the same everywhere. Its collectives do not depend on each other.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh, PartitionSpec

from swift.jaxprs import scan_counts
from swift.mesh.collective_order import in_order

BOTH, RING = ("worker", "expert"), [(0, 1), (1, 2), (2, 0)]
SPLIT, WHOLE = PartitionSpec(BOTH), PartitionSpec()


def side_by_side(x_4, which, rounds):
    del which, rounds
    whole = lax.pmax(2 * x_4, BOTH), lax.all_gather(x_4, "expert"), lax.psum_scatter(x_4, "expert", tiled=True)
    return (
        lax.psum(x_4, "expert"),
        lax.ppermute(x_4, "worker", RING),
        lax.all_to_all(x_4.reshape(2, 2), "expert", 0, 1),
        *whole,
    )


def trees(x_4, which, rounds):
    both = lax.psum({"a": x_4, "b": (which, [x_4[0]])}, BOTH)
    return {"both": both, "moved": lax.ppermute([x_4, which], "worker", RING), "none": (), "same": rounds}


def of_nothing(x_4, which, rounds):
    """A model without experts counts the tokens of no layer."""
    del which, rounds
    return lax.psum(x_4, BOTH), lax.psum(x_4[:0], "expert"), lax.ppermute(x_4, "worker", RING)


def inner_jit(x_4, which, rounds):
    del which, rounds
    inner = jax.jit(lambda y: (lax.psum(y, "expert"), lax.ppermute(y, "worker", RING)))
    return lax.psum(x_4, BOTH), inner(x_4), lax.psum(3 * x_4, "expert")


def inner_gradient(x_4, which, rounds):
    """Through rematerialisation, and a function with a derivative of its own."""
    del which, rounds

    @jax.custom_vjp
    def own(y):
        return lax.psum(y, "expert")

    own.defvjp(lambda y: (own(y), y), lambda y, g: (lax.psum(y, "expert") + lax.psum(g, "worker"),))
    again = jax.checkpoint(lambda y: jnp.sin(lax.psum(jnp.sin(y), "expert")))
    return own(x_4), again(x_4), jax.grad(lambda y: jnp.sum(own(y) + again(y)))(x_4)


def two_branches(x_4, which, rounds):
    del rounds

    def one(y):
        return lax.psum(y, "expert"), lax.psum(2 * y, "expert")

    def other(y):
        return lax.psum(3 * y, "expert"), y

    before = lax.ppermute(x_4, "worker", RING)
    return before, lax.cond(which == 0, one, other, x_4), lax.ppermute(2 * x_4, "worker", RING)


def three_branches(x_4, which, rounds):
    del rounds
    branches = [
        lambda y: lax.psum(y, "expert") + lax.psum(y * y, "expert"),
        lambda y: -y,
        lambda y: lax.all_to_all(y.reshape(2, 2), "expert", 0, 0).ravel(),
    ]
    before = lax.ppermute(x_4, "worker", RING)
    return before, lax.switch(which, branches, x_4), lax.psum(x_4, BOTH)


def loop(x_4, which, rounds):
    def body(index, sums):
        first, second = sums
        moved = lax.ppermute(x_4 + index, "worker", RING)
        return first + lax.psum(x_4 * index, "expert"), jnp.maximum(second, moved)

    sums = lax.fori_loop(which * 0, rounds, body, (x_4, x_4))
    return lax.psum(x_4, BOTH), sums, lax.psum(which, BOTH)


def scanned(x_4, which, rounds):
    del rounds

    def step(total, now):
        scale, row_4 = now
        moved = lax.ppermute(x_4 * scale, "worker", RING)
        return total + jnp.sum(moved), (lax.psum(row_4 + which, "expert"), total)

    xs = jnp.arange(3, dtype=x_4.dtype), jnp.outer(x_4[:3], x_4)
    before = lax.psum(x_4, BOTH)
    return before, lax.scan(step, x_4[0], xs, reverse=True), lax.psum(2 * x_4, BOTH)


def scan_without_carry(x_4, which, rounds):
    del which, rounds
    return lax.psum(2 * x_4, BOTH), lax.map(lambda value: lax.psum(value, "expert"), x_4)


def nested(x_4, which, rounds):
    """A scan around a loop around a branch around another scan, and collectives between all of them."""

    def busy(y):
        _, sums = lax.scan(lambda none, value: (none, lax.psum(value, "expert")), None, y)
        return sums

    @jax.jit
    def round_of(index, sums):
        return sums + lax.switch(which, [busy, jnp.negative, lambda y: lax.psum(y, "expert")], x_4 * index)

    def step(total, row_4):
        first = lax.ppermute(row_4, "worker", RING)
        looped = lax.fori_loop(0, rounds, round_of, row_4)
        return total + x_4, (first, looped, lax.ppermute(x_4 + 1, "worker", RING))

    return lax.psum(x_4, BOTH), lax.scan(step, x_4, jnp.outer(x_4[:2], x_4)), lax.psum(which, BOTH)


def no_collectives(x_4, which, rounds):
    own_jvp, own_vjp = jax.custom_jvp(jnp.sin), jax.custom_vjp(jnp.cos)
    own_jvp.defjvps(lambda g, _, y: g * y)
    own_vjp.defvjp(lambda y: (y, y), lambda _, g: (g,))
    total = lax.fori_loop(0, rounds, lambda i, y: y + i, own_jvp(x_4) + own_vjp(x_4))
    return lax.cond(which == 0, jnp.sin, jnp.cos, total), {"rank": lax.axis_index("expert")}, np.float32(3)


CASES = {
    side_by_side: (1, 6),
    trees: (1, 5),
    of_nothing: (1, 2),
    inner_jit: (1, 4),
    inner_gradient: (1, 8),
    two_branches: (2, 4),
    three_branches: (3, 4),
    loop: (3, 6),
    scanned: (1, 8),
    scan_without_carry: (1, 4),
    nested: (169, 18),
}
"""Number of paths of a case, and of collectives on the longest, as ``Path`` walks them."""


def on_devices(function: Callable, num_split: int) -> Callable:
    """Three workers of two expert ranks; the first arguments are split over them, all devices have the others."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), BOTH)

    def body(*args):
        blocks = [arg[0] for arg in args[:num_split]]
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*blocks, *args[num_split:]))

    def run(*args):
        specs = (*[SPLIT] * num_split, *[WHOLE] * (len(args) - num_split))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)(*args)

    return run


def inputs(num_rounds: int = 2) -> tuple[np.ndarray, ...]:
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    return x, np.arange(6, dtype=np.int32) // 2, np.int32(num_rounds)


def assert_same_bits(found, wanted) -> None:
    """The same tree of arrays, of the same types and shapes, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("function", [*CASES, no_collectives], ids=lambda function: function.__name__)
def test_an_ordered_program_computes_what_it_did(function):
    ordered, plain = (jax.jit(on_devices(f, 2)) for f in (in_order(function, BOTH), function))
    for num_rounds in (0, 2) if function in (loop, nested) else (2,):
        assert_same_bits(ordered(*inputs(num_rounds)), plain(*inputs(num_rounds)))


@pytest.mark.parametrize("shape", [(3, 1), (2, 1), (1, 2), (3, 2), (4, 2)])
def test_xla_does_not_find_out_what_the_token_is(shape):
    """The index along an axis of size 1, for example, is a constant to it."""

    def twice(x_4):
        return lax.psum(x_4, BOTH), lax.pmax(x_4, BOTH)

    def compiled(function):
        mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), BOTH)
        run = jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
        return jax.jit(run).lower(np.ones((shape[0] * shape[1] * 2, 4), np.float32)).compile().as_text()

    assert compiled(in_order(twice, BOTH)).count(" select(") == 2
    assert compiled(twice).count(" select(") == 0


def moves(x_X):
    """Collectives that do not compute."""
    swapped = lax.all_to_all(x_X.reshape(2, 2), "expert", 0, 0)
    return lax.ppermute(x_X, "worker", RING), swapped, lax.all_gather(x_X, "worker")


def bits(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "values",
    [
        np.array([True, False, True, True]),
        np.array([-7, 2**31 - 1, -(2**31), 0], np.int32),
        np.array([0, 255, 1, 128], np.uint8),
        np.array([1.5, -0.0, np.nan, -np.inf]).astype(jnp.bfloat16),
        bits(0x80000000, 0x7FC00123, 0xFFC00001, 0x00000001),
        np.array([-0.0, np.nan, 1e300, 5e-324]),
        np.array([2**62 + 1, -1, 0, 3]),
    ],
    ids=["bool", "int32", "uint8", "bfloat16", "minus zero, not numbers and a denormal", "float64", "int64"],
)
def test_operands_of_all_types_arrive_bit_for_bit(values):
    """The first value decides what a token is made of: it is anything."""
    with jax.enable_x64(True):
        for first in range(4):
            x = np.tile(np.roll(values, first), (6, 1))
            x[1::2] = x[1::2, ::-1]
            forth, swapped, gathered = jax.jit(on_devices(in_order(moves, BOTH), 1))(x)
            assert_same_bits(forth, np.roll(x, 2, axis=0))
            assert_same_bits(swapped, x.reshape(3, 2, 2, 2).swapaxes(1, 2).reshape(6, 2, 2))
            assert_same_bits(gathered, np.tile(x.reshape(3, 2, 4).swapaxes(0, 1), (3, 1, 1, 1)).reshape(6, 3, 4))


COLLECTIVES = {"psum", "psum_invariant", "pmax", "ppermute", "all_gather", "all_to_all", "reduce_scatter"}

After = frozenset[int]
"""The collectives, in the order in which a path comes to them, whose results a value depends on."""


class Path:
    """A walk along one path of a program, which takes one branch of every ``cond`` and some rounds of every loop.

    Attributes:
        choose: the number of ways that there are to the one that is taken.
        num_collectives: so far.
        early: sentences on collectives that do not wait for the one before.
    """

    def __init__(self, choose: Callable[[int], int]):
        self.choose, self.num_collectives, self.early = choose, 0, list[str]()

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[After]) -> list[After]:
        """Computes what the outputs depend on, given what the inputs do."""
        open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env = dict(zip(open_jaxpr.invars, inputs, strict=True)) | dict.fromkeys(open_jaxpr.constvars, After())
        of = lambda atom: After() if isinstance(atom, Literal) else env[atom]  # noqa: E731
        for equation in open_jaxpr.eqns:
            env |= zip(equation.outvars, self.equation(equation, [of(v) for v in equation.invars]), strict=True)
        return [of(atom) for atom in open_jaxpr.outvars]

    def equation(self, equation: JaxprEqn, inputs: list[After]) -> list[After]:
        """The same for one equation; which way is taken is not counted as something to wait for."""
        name, params, together = equation.primitive.name, equation.params, After().union(*inputs)
        if name in COLLECTIVES and equation.invars[0].aval.size:  # XLA leaves out what moves nothing
            return [self.collective(equation, inputs)] * len(equation.outvars)
        if name == "cond":
            return self.jaxpr(params["branches"][self.choose(len(params["branches"]))], inputs[1:])
        if name == "while":
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry = inputs[second:]
            for _ in range(self.choose(3)):
                carry = self.jaxpr(params["body_jaxpr"], [*inputs[first:second], *carry])
            return carry
        if name == "scan":
            return self.scan(params, inputs)
        inner = [value for value in params.values() if isinstance(getattr(value, "jaxpr", value), Jaxpr)]
        assert len(inner) <= 1, f"no rule for {name}"
        return self.jaxpr(inner[0], inputs) if inner else [together] * len(equation.outvars)

    def collective(self, equation: JaxprEqn, inputs: list[After]) -> After:
        """Outputs depend on the collective itself, too."""
        before, self.num_collectives = self.num_collectives, self.num_collectives + 1
        if before and not all(before - 1 in after for after in inputs):
            self.early.append(f"{equation} waits for {[sorted(after) for after in inputs]}, not for {before - 1}")
        return After([before]).union(*inputs)

    def scan(self, params: dict, inputs: list[After]) -> list[After]:
        """All rounds but those that are like the first three."""
        num_consts, num_carry = scan_counts(params)
        consts, others = inputs[:num_consts], inputs[num_consts:]
        carry, xs = others[:num_carry], others[num_carry:]
        ys = [After()] * (len(params["jaxpr"].out_avals) - num_carry)
        for _ in range(min(params["length"], 3)):
            outputs = self.jaxpr(params["jaxpr"], [*consts, *carry, *xs])
            carry, ys = outputs[:num_carry], [a | b for a, b in zip(ys, outputs[num_carry:], strict=True)]
        return [*carry, *ys]


def paths(function: Callable) -> Iterator[Path]:
    """All paths of a per-rank function."""
    jaxpr = jax.make_jaxpr(on_devices(function, 2))(*inputs())
    (spec,) = (equation.params["jaxpr"] for equation in jaxpr.eqns if equation.primitive.name == "shard_map")
    choices: list[int] | None = []
    while choices is not None:
        taken: list[tuple[int, int]] = []

        def choose(num_ways: int, choices=choices, taken=taken) -> int:
            taken.append((choices[len(taken)] if len(taken) < len(choices) else 0, num_ways))
            return taken[-1][0]

        path = Path(choose)
        path.jaxpr(spec, [After()] * len(spec.invars))
        yield path
        choices = following(taken)


def following(taken: list[tuple[int, int]]) -> list[int] | None:
    """The choices after those that were taken, as (choice, ways): the last that has another way takes it."""
    while taken and taken[-1][0] + 1 == taken[-1][1]:
        taken = taken[:-1]
    return [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_every_collective_waits_for_the_one_before_on_every_path(function):
    ordered = list(paths(in_order(function, BOTH)))
    assert [early for path in ordered for early in path.early] == []
    assert (len(ordered), max(path.num_collectives for path in ordered)) == CASES[function]


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_without_order_some_collective_does_not_wait(function):
    assert any(path.early for path in paths(function))


def test_collectives_across_the_borders_of_branches_and_loops_wait():
    """The first collective inside waits for the last before, and the first behind for the last inside."""

    def across(x_4, which, rounds):
        before = lax.psum(x_4, "expert")
        inside = lax.fori_loop(0, rounds, lambda _, y: lax.psum(y, "expert"), before)
        return lax.cond(which == 0, lambda y: lax.psum(y, "expert"), lambda y: y, inside), lax.psum(x_4, "expert")

    unordered = {path.num_collectives: path.early for path in paths(across)}
    assert all(len(early) == 1 for early in unordered.values())  # the last one alone waits for nobody
    assert not any(path.early for path in paths(in_order(across, BOTH)))
