"""No rank branches on what is its own: then shard_map does not deadlock and vmap makes no select of a branch.

The jaxpr of an iteration is walked with a taint: what differs between the ranks of a worker. A sum over the axis
removes it; a branch or a loop must not depend on it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

from swift.data import Batch
from swift.experts import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement import FlexMoE, MinMax, Static, Symi
from swift.mesh import RANKED, SHARED, live_mesh
from swift.models import ModelConfig
from swift.pipeline import lone_evaluation, lone_step
from swift.topology import Topology
from swift.train import Experiment

CLEANSING = ("psum", "psum_invariant", "pmax", "pmin", "all_gather")


def inner(value):
    """A closed or open jaxpr's equations, inputs and outputs."""
    return getattr(value, "jaxpr", value)


def walk(jaxpr, tainted, found):
    """Which outputs of ``jaxpr`` differ between ranks, given which inputs do; bad branches are added to ``found``."""
    state = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*tainted, *[False] * len(jaxpr.constvars)], strict=True))
    differs = lambda v: not isinstance(v, Literal) and state[v]  # noqa: E731
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [differs(v) for v in equation.invars]
        outputs = [any(inputs)] * len(equation.outvars)
        grouped = equation.params.get("axis_index_groups") is not None
        if name == "axis_index":
            outputs = [True]
        elif name in CLEANSING and not grouped:
            outputs = [False] * len(equation.outvars)
        elif name == "cond":
            if inputs[0]:
                found.append(str(equation.source_info.traceback or equation)[:400])
            branches = [walk(inner(branch), inputs[1:], found) for branch in equation.params["branches"]]
            outputs = [inputs[0] or any(out) for out in zip(*branches, strict=True)]
        elif name == "while":
            outputs = walk_while(equation, inputs, found)
        elif name == "scan":
            outputs = walk_scan(equation, inputs, found)
        elif name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"):
            sub = inner(equation.params.get("jaxpr") or equation.params.get("call_jaxpr"))
            outputs = walk(sub, inputs, found)
        state.update(zip(equation.outvars, outputs, strict=True))
    return [differs(v) for v in jaxpr.outvars]


def walk_while(equation, inputs, found):
    params = equation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    carry = inputs[num_cond + num_body :]
    for _ in range(len(carry) + 1):
        carry = [a or b for a, b in zip(carry, walk(inner(params["body_jaxpr"]), body + carry, []), strict=True)]
    walk(inner(params["body_jaxpr"]), body + carry, found)
    if any(walk(inner(params["cond_jaxpr"]), cond + carry, found)):
        found.append(f"while over {equation}"[:400])
    return carry


def walk_scan(equation, inputs, found):
    params = equation.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.12 keeps the trees of (constants, carry, inputs) instead
        num_consts, num_carry = (
            len(jax.tree.leaves(tree, is_leaf=lambda x: x is None)) for tree in params["ft_in"][:2]
        )
    assert num_consts + num_carry <= len(inputs)
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    outputs = []
    for _ in range(num_carry + 1):
        outputs = walk(inner(params["jaxpr"]), consts + carry + xs, [])
        carry = [a or b for a, b in zip(carry, outputs[:num_carry], strict=True)]
    walk(inner(params["jaxpr"]), consts + carry + xs, found)
    return carry + outputs[num_carry:]


def varying_branches(function, arguments):
    """Branches and loops of the program's shard_map that depend on what differs between ranks."""
    (equation,) = [
        e
        for outer in jax.make_jaxpr(function)(*arguments).jaxpr.eqns
        for e in (inner(outer.params["jaxpr"]).eqns if outer.primitive.name in ("jit", "pjit") else [outer])
        if e.primitive.name == "shard_map"
    ]
    sub = inner(equation.params["jaxpr"])
    ranked = ["expert" in str(spec) for spec in equation.params["in_specs"]]
    found: list[str] = []
    walk(sub, ranked, found)
    assert any(ranked)
    assert not all(ranked)
    return found


@pytest.mark.parametrize(
    ("policy", "layout"),
    [(Symi(), "decoupled"), (MinMax(), "decoupled"), (Static(), "coupled"), (FlexMoE(2), "coupled")],
    ids=str,
)
def test_no_branch_of_an_iteration_differs_between_ranks(policy, layout):
    experiment = Experiment(
        model=ModelConfig(1, 16, 2, 16, 8, (True,)),
        experts=ExpertConfig(4, 2),
        placement=policy,
        topology=Topology(num_expert_ranks=4),
        optimizer=OptimizerConfig(layout=layout),
        sequences_per_microbatch=4,
    )
    program = experiment.program()
    state = jax.eval_shape(lambda: program.fill_slots(program.init(jax.random.key(0))))
    types = (jnp.int32, jnp.int32, jnp.bool_)
    batch = Batch(*(jax.ShapeDtypeStruct((1, 2, 4, 1, 8), dtype) for dtype in types))
    assert varying_branches(lone_step(program), (state, batch)) == []
    assert varying_branches(lone_evaluation(program), (state, batch)) == []


@pytest.mark.parametrize("source", ["own index", "own data"])
def test_the_walk_finds_a_branch_that_differs(source):
    live = live_mesh(Topology(num_expert_ranks=4), "emulated")

    def per_rank(ranked, shared):
        chosen = lax.axis_index("expert") if source == "own index" else ranked[0].astype(jnp.int32)
        uniform = lax.cond(shared[0] > 0, lambda x: x + 1, lambda x: x, ranked)
        return lax.cond(chosen > 1, lambda x: x + 1, lambda x: x, uniform)

    arguments = (jnp.ones((1, 3, 4)), jnp.ones((1, 2)))
    assert len(varying_branches(live.per_rank(per_rank, (RANKED, SHARED), RANKED), arguments)) == 1
