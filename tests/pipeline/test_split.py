"""F, B and W against the fused gradient: exact, no FLOPs more, and nothing kept that need not be."""

import itertools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from swift.experts.config import ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.layer import expert_parallel_moe
from swift.mesh.per_rank import EXPERT_AXIS
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.pipeline.split_backward.equations import dot_flops, num_bytes
from swift.pipeline.split_backward.partition import minimum_cut
from swift.pipeline.split_backward.split import split

pytestmark = pytest.mark.usefixtures("x64")

RANKS, LAYERS, DIM = 2, 2, 64
EXPERTS = ExpertConfig(num_classes=4, slots_per_rank=2, capacity=SlotCapacity(0.75))
PLACEMENT_LNS = np.tile(np.array([[[0, 1], [2, 3]]], np.int32), (LAYERS, 1, 1))
ENV = [(EXPERT_AXIS, RANKS)]


def gpt_stage(moe, remat, experts=EXPERTS):
    """(the function of a stage of two layers, its weights, its extras, its input, a cotangent)."""
    config = ModelConfig(LAYERS, DIM, num_heads=2, ffn_dim=4 * DIM, sequence_length=32, moe_pattern=(moe,))
    gpt = GPT(config, vocab_size=8, num_classes=2)  # the two slots of a rank

    def f(weights, extras, x):
        placement, valid = extras

        def run(row, logits, x_TD, valid_T, state, router_state):
            apply = gpt.groups["expert"].module(state)
            return expert_parallel_moe(experts, logits, x_TD, valid_T, placement[row], apply, router_state)

        y, aux, loads = gpt.stage(weights, config.moe_layers, x, valid, run)
        return (y, aux), loads

    random = np.random.default_rng(0)
    weights = gpt.unpack(jax.tree.map(lambda p: p + 0.1 * random.standard_normal(p.shape), gpt.init(jax.random.key(0))))
    weights = {name: rows for name, rows in weights.items() if name not in ("embedding", "head")}
    if moe:  # a router of as many classes as all ranks hold
        gpt = GPT(config, vocab_size=8, num_classes=EXPERTS.num_classes)
        router = gpt.unpack(gpt.init(jax.random.key(1)))["router"]
        weights["router"] = jax.tree.map(lambda p: 20 * p.astype(jnp.float64), router)
    x, dy = random.standard_normal((2, RANKS, 2, 32, DIM))
    valid = np.arange(32)[None] < np.array([[32], [29]])
    return (jax.checkpoint(f) if remat else f), weights, (PLACEMENT_LNS, valid), x, (dy, np.full(RANKS, 0.3))


def on_ranks(function, *specs):
    """``function`` on every expert rank: arguments and results of spec True have a leading dim of ranks."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), (EXPERT_AXIS,))
    here = tuple(PartitionSpec(EXPERT_AXIS) if ranked else PartitionSpec() for ranked in specs)

    def body(*args):
        args = [jax.tree.map(lambda a: a[0], arg) if ranked else arg for arg, ranked in zip(args, specs, strict=True)]
        return jax.tree.map(lambda a: jnp.asarray(a)[None], function(*args))

    out = PartitionSpec(EXPERT_AXIS)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=here, out_specs=out, check_vma=False))


def fused(f):
    def run(params, extras, x, d_out):
        out, vjp, metrics = jax.vjp(lambda params, x: f(params, extras, x), params, x, has_aux=True)
        return out, metrics, *vjp(d_out)

    return run


def assert_close(found, expected, tolerance=1e-12):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max(initial=0) > 0 or not b.size
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0))


def compiled(function, *args):
    """(the results, the FLOPs) of one program."""
    program = function.lower(*args).compile()
    return program(*args), program.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("moe", "remat"),
    [
        (True, False),
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_a_stage_has_the_gradients_of_the_fused_backward_and_no_more_flops(moe, remat):
    f, weights, extras, x, d_out = gpt_stage(moe, remat)
    s = split(f, weights, extras, x[0], ENV)
    whole = on_ranks(fused(f), False, False, True, True)
    forward = on_ranks(s.forward, False, False, True)
    backward_input = on_ranks(s.backward_input, False, False, True, True, True)
    backward_weight = on_ranks(s.backward_weight, False, False, True, True)

    (out, metrics, dparams, dx), most = compiled(whole, weights, extras, x, d_out)
    (found_out, found_metrics, b_stash, h_stash), of_forward = compiled(forward, weights, extras, x)
    (found_dx, w_stash), of_input = compiled(backward_input, weights, extras, b_stash, h_stash, d_out)
    found_dparams, of_weight = compiled(backward_weight, weights, extras, h_stash, w_stash)
    chex.assert_trees_all_equal(found_metrics, metrics)
    if moe:
        assert all((load.dropped_E.sum() > 0) for load in metrics)
        assert_close(found_out, out)
    assert_close((found_out[0], found_dx, found_dparams), (out[0], dx, dparams))
    assert of_forward + of_input + of_weight <= 1.02 * most


def traced(s, params, extras, x, d_out):
    """The jaxprs of F, B and W."""
    make = lambda function, *args: jax.make_jaxpr(function, axis_env=ENV)(*args)  # noqa: E731
    return (
        make(s.forward, params, extras, x),
        make(s.backward_input, params, extras, *s.stash_shapes[:2], d_out),
        make(s.backward_weight, params, extras, *s.stash_shapes[1:]),
    )


@pytest.mark.parametrize("moe", [False, True])
def test_w_has_the_weights_matmuls_and_no_others(moe):
    f, weights, extras, x, d_out = gpt_stage(moe, remat=False)
    x, d_out = jax.tree.map(lambda a: a[0], (x, d_out))
    forward, backward_input, backward_weight = map(
        dot_flops, traced(split(f, weights, extras, x, ENV), weights, extras, x, d_out)
    )
    attention = 2 * 2 * 2 * LAYERS * 2 * 32 * 32 * DIM // 2  # of queries, keys and values, not of weights
    assert (backward_input, backward_weight) == (forward + attention, forward - attention)


def test_capacity_by_rank_takes_the_flops_of_capacity_by_slot():
    found = {}
    for experts in (EXPERTS, replace(EXPERTS, capacity=RankCapacity(0.75))):
        f, weights, extras, x, d_out = gpt_stage(True, False, experts)
        x, d_out = jax.tree.map(lambda a: a[0], (x, d_out))
        parts = traced(split(f, weights, extras, x, ENV), weights, extras, x, d_out)
        found[type(experts.capacity)] = tuple(map(dot_flops, parts))
    assert found[RankCapacity] == found[SlotCapacity]  # 48 rows of a rank, no block to fill


def test_only_what_the_linears_read_goes_to_w():
    f, weights, extras, x, _ = gpt_stage(moe=False, remat=False)
    s = split(f, weights, extras, x[0], ENV)
    tokens = 2 * 32
    big = lambda shapes: sum(num_bytes(shape) for shape in shapes if shape.size > tokens) // (8 * tokens * DIM)  # noqa: E731
    # Of a layer: the residual stream twice, the mixed values and the MLP's up-projection | their cotangents.
    assert big(s.stash_shapes.for_b_and_w) == LAYERS * (2 + 1 + 4)
    assert big(s.stash_shapes.for_w) == LAYERS * (3 + 1 + 4 + 1)
    # The queries, keys and values, and the scores of 2 heads x 32 positions for each of 64 channels.
    assert big(s.stash_shapes.for_b) == LAYERS * (3 + 1)


def test_a_rematerialised_stage_keeps_its_input_alone():
    f, weights, extras, x, _ = gpt_stage(moe=True, remat=True)
    s = split(f, weights, extras, x[0], ENV)
    assert [shape.shape for shape in s.stash_shapes.for_b + s.stash_shapes.for_b_and_w] == [x[0].shape]


def layer(params, extras, x):
    """A function whose residuals are parameters, in other shapes, an extra, and one value several times."""
    w, b = params
    h = jnp.sin(x @ w.T.astype(x.dtype) + jnp.exp(b)[None]) * extras
    return (h * h) @ jnp.tanh(w) * 2, jnp.sum(h > 0)


def test_what_depends_on_parameters_and_extras_alone_is_not_kept():
    random = np.random.default_rng(0)
    w, b, extras, x, dy = (random.standard_normal(s) for s in ((5, 7), (5,), (3, 5), (3, 7), (3, 7)))
    s = split(layer, (w.astype(np.float32), b), extras, x)
    # x for W; the sine's input for both; no parameter [5, 7] or [7, 5], and the extra [3, 5] only inside of products.
    assert sorted(shape.shape for shape in s.stash_shapes.for_b + s.stash_shapes.for_b_and_w) == [(3, 5), (3, 7)]
    params = (w.astype(np.float32), b)
    out, metrics, b_stash, h_stash = s.forward(params, extras, x)
    dx, w_stash = s.backward_input(params, extras, b_stash, h_stash, dy)
    dparams = s.backward_weight(params, extras, h_stash, w_stash)
    assert not any(np.array_equal(kept, extras) for kept in (*b_stash, *h_stash, *w_stash))
    expected = fused(layer)(params, extras, x, dy)
    assert_close((out, metrics), expected[:2])
    assert_close(dx, expected[3])
    assert_close(dparams[1], expected[2][1])
    assert_close(dparams[0], expected[2][0], tolerance=1e-6)  # float32


def test_nothing_is_kept_twice():
    f, weights, extras, x, d_out = gpt_stage(moe=True, remat=False)
    s = split(f, weights, extras, x[0], ENV)
    _, _, b_stash, h_stash = on_ranks(s.forward, False, False, True)(weights, extras, x)
    _, w_stash = on_ranks(s.backward_input, False, False, True, True, True)(weights, extras, b_stash, h_stash, d_out)
    kept = [np.asarray(a).tobytes() for a in (*b_stash, *h_stash, *w_stash) if a.size > 64]
    assert len(set(kept)) == len(kept)


def test_a_loop_stays_whole_and_right():
    def f(w, extras, x):
        y, _ = jax.lax.scan(lambda c, w: (jnp.sin(c @ w) + extras, None), x, w)
        return y, None

    w, x, dy = (np.random.default_rng(0).standard_normal(s) for s in ((3, 4, 4), (2, 4), (2, 4)))
    assert_split_is_exact(f, w, np.float64(0.5), x, dy)
    s = split(f, w, np.float64(0.5), x)
    assert dot_flops(traced(s, w, np.float64(0.5), x, dy)[0]) == 3 * 2 * 2 * 4 * 4


def assert_split_is_exact(f, params, extras, x, d_out):
    s = split(f, params, extras, x)
    out, metrics, b_stash, h_stash = s.forward(params, extras, x)
    dx, w_stash = s.backward_input(params, extras, b_stash, h_stash, d_out)
    dparams = s.backward_weight(params, extras, h_stash, w_stash)
    for stash, shapes in zip((b_stash, h_stash, w_stash), s.stash_shapes, strict=True):
        assert [(a.shape, a.dtype) for a in stash] == [(shape.shape, shape.dtype) for shape in shapes]
    expected = fused(f)(params, extras, x, d_out)
    found = (out, metrics, dparams, dx)
    chex.assert_trees_all_close(found, expected, rtol=1e-11, atol=1e-12)


STEPS = {
    "linear": lambda x, w, _: x @ w,
    "bias": lambda x, w, _: x + w[:1],
    "tied": lambda x, w, _: jnp.tanh(x @ w) @ w.T,
    "gate": lambda x, w, _: x * jax.nn.sigmoid(x @ w),
    "norm": lambda x, w, _: (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1) * w[:1],
    "residual": lambda x, w, _: x + jax.nn.gelu(x @ w),
    "mask": lambda x, _, mask: jnp.where(mask, x, 0.1 * x),
    "checkpoint": lambda x, w, _: jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ jnp.cos(w))(x, w),
    "softmax": lambda x, w, _: jax.nn.softmax(x @ x.T) @ x @ w,
    "relu": lambda x, w, _: jax.nn.relu(x @ w),
}


STACKS = {
    "steps": st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    "shared": st.booleans(),
    "seed": st.integers(0, 99),
}


def check_stack(steps, shared, seed):
    random = np.random.default_rng(seed)
    weights, x, dy = (0.5 * random.standard_normal(s) for s in ((len(steps), 4, 4), (3, 4), (3, 4)))
    mask = random.random((3, 4)) < 0.5

    def f(weights, mask, x):
        for i, name in enumerate(steps):
            x = STEPS[name](x, weights[0 if shared else i], mask)
        return (x, jnp.sum(x * x)), jnp.sum(x > 0)

    assert_split_is_exact(f, weights, mask, x, (dy, np.float64(0.7)))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_two_layers_are_split_exactly(name):
    check_stack([name, name], shared=False, seed=0)


@settings(max_examples=8, deadline=None)
@given(**STACKS)
def test_any_stack_of_layers_is_split_exactly(steps, shared, seed):
    check_stack(steps, shared, seed)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(**STACKS)
def test_any_of_many_stacks_of_layers_is_split_exactly(steps, shared, seed):
    check_stack(steps, shared, seed)


def exchange(w, extras, x):
    """A function with collectives that are not their own transpose, and an input of several leaves."""
    sent = jax.lax.all_to_all(jnp.sin(x["a"] @ w), EXPERT_AXIS, 0, 1, tiled=True)
    share = jax.lax.psum(jax.lax.stop_gradient(sent).sum(), EXPERT_AXIS)
    return {"y": jnp.tanh(sent) @ jnp.concatenate([w, w]) * extras + x["b"]}, share


@pytest.mark.parametrize("inside", [False, True])
def test_collectives_of_virtual_ranks(inside):
    """The split may be made inside of the mapped axis or, by the axis's size, outside."""
    random = np.random.default_rng(0)
    w, extras, a, b, dy = (random.standard_normal(s) for s in ((4, 4), (), (2, 6, 4), (2, 3, 4), (2, 3, 4)))
    x = {"a": a, "b": b}
    outside = None if inside else split(exchange, w, extras, jax.tree.map(lambda leaf: leaf[0], x), ENV)

    def on_rank(w, extras, x, d_out):
        s = outside or split(exchange, w, extras, x)
        out, metrics, b_stash, h_stash = s.forward(w, extras, x)
        dx, w_stash = s.backward_input(w, extras, b_stash, h_stash, d_out)
        return out, metrics, s.backward_weight(w, extras, h_stash, w_stash), dx

    run = lambda f: jax.vmap(f, in_axes=(None, None, 0, 0), axis_name=EXPERT_AXIS)(w, extras, x, {"y": dy})  # noqa: E731
    assert_close(run(on_rank), run(fused(exchange)))


@given(st.data())
def test_the_cut_is_the_lightest_and_nearest_to_the_sinks(data):
    nodes = range(data.draw(st.integers(1, 6)))
    weights = {node: data.draw(st.integers(1, 4)) for node in nodes}
    pairs = [(a, b) for a in nodes for b in nodes if a < b]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    sources, sinks = (data.draw(st.lists(st.sampled_from(nodes), unique=True)) for _ in range(2))

    def behind(cut):
        """Finds what the sources reach in front of a cut; None if that is a sink."""
        reached = {node for node in sources if node not in cut}
        for a, b in sorted(edges):
            reached |= {b} if a in reached and b not in cut else set()
        return None if reached & set(sinks) else reached

    subsets = [set(c) for n in range(len(nodes) + 1) for c in itertools.combinations(nodes, n)]
    weigh = lambda cut: sum(weights[node] for node in cut)  # noqa: E731
    cuts = [cut for cut in subsets if behind(cut) is not None]
    best = [cut for cut in cuts if weigh(cut) == min(map(weigh, cuts))]
    found = set(minimum_cut(weights, edges, sources, sinks))
    assert found in best
    assert all(behind(cut) <= behind(found) for cut in best)


def test_flops_of_loops_and_branches():
    def f(w, x):
        x, _ = jax.lax.scan(lambda c, _: (c @ w, None), x, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x, x)

    assert dot_flops(jax.make_jaxpr(jax.jit(f))(jnp.ones((4, 4)), jnp.ones((3, 4)))) == 7 * 2 * 3 * 4 * 4


def test_what_attention_in_blocks_keeps_grows_with_the_positions():
    """No scores: four times as many positions, four times the stashes; all scores would be sixteen times as many."""

    def kept(kernel, length):
        config = ModelConfig(1, DIM, 2, 4 * DIM, length, (False,))
        gpt = GPT(config, 8, 1, kernel)
        weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
        layers = {name: weights[name] for name in ("attention", "mlp")}
        x = jax.ShapeDtypeStruct((1, length, DIM), jnp.float32)
        valid = jax.ShapeDtypeStruct((1, length), bool)
        one = split(lambda layers, valid, x: gpt.stage(layers, (False,), x, valid, print)[::2], layers, valid, x)
        return sum(map(num_bytes, sum(one.stash_shapes, ())))

    short, long = (kept("blockwise", length) for length in (1024, 4096))
    assert long <= 4 * short
    assert kept("plain", 1024) > 2 * short


def test_attention_computed_again_is_not_kept():
    """Neither its scores, nor its queries, keys and values."""
    config = ModelConfig(1, DIM, 2, 4 * DIM, 256, (False,))
    gpt = GPT(config, 8, 1)
    weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
    layers = {name: weights[name][0] for name in ("attention", "mlp")}
    x, valid = jax.ShapeDtypeStruct((1, 256, DIM), jnp.float32), jax.ShapeDtypeStruct((1, 256), bool)

    def kept(wrap):
        one = split(lambda layers, valid, x: gpt.block(layers, x, valid, print, None, wrap)[::2], layers, valid, x)
        return sum(map(num_bytes, (*one.stash_shapes.for_b, *one.stash_shapes.for_b_and_w)))

    scores = 2 * 256**2 * 4
    assert kept(None) > scores
    assert kept(jax.checkpoint) < kept(None) - scores
