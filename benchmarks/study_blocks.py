"""A program in which every worker runs another number of blocks in a tick: whether it hangs, is right, and copies.

A toy of what a pipeline's step would be if its unit of work were a block and not a stage. In every tick a worker runs
nothing, a forward op or a weight-gradient op on a run of its blocks, ``first`` to ``first + count``, which are data. A
block is of one of two kinds, by its row; one kind exchanges tokens over the expert axis. So there are three levels of
control flow that differ between workers (op, number of blocks, kind of block), with collectives over ``expert`` inside
all three, and a ``ppermute`` over ``worker`` outside, as the tick interpreter has it. Figures:

- ``trips``: runs of random tables on emulated devices against NumPy;
- ``copies``: copies of stashes and sums in the compiled program, with a ``cond`` for each kind of block around what
  only that kind updates, and with both kinds in the branches of one ``cond``;
- ``cpu_us``: CPU-microseconds by device of an idle tick, of a tick with an op of no block, and of a block more; for
  blocks so small that nothing but the control flow counts;
- ``weights``: CPU-seconds of a loop over rows of weights over the same matmuls unrolled: what reading a row costs.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measure import cost_of, paired_costs, publish, ratio

from swift.mesh.live import live_mesh
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, REPLICATED, SHARED, WORKER_AXIS
from swift.pipeline.state import add_to_layer, layer_of, put_layer, take_layer
from swift.topology import Topology

WORKERS, RANKS, SLOTS = 4, 2, 2
NOTHING, FORWARD, WEIGHT = range(3)
RING = tuple((row, (row + 1) % WORKERS) for row in range(WORKERS))


class Table(NamedTuple):
    """Ops of every worker, int32[R, T] each, and the kinds of its blocks, bool[R, L]."""

    op: Any
    first: Any
    count: Any
    slot: Any
    exchanges: Any


class State(NamedTuple):
    """The carry of the loop over ticks: the message x [T, D]; by kind stashes [slot, L, T, D] and sums [L, D, D]."""

    x: Any
    stash: dict[bool, Any]
    sums: dict[bool, Any]


def block(weights: jax.Array, x: jax.Array, exchanges: bool) -> jax.Array:
    """A block of either kind; one exchanges half of its tokens and sums over the expert ranks."""
    h = jnp.tanh(x @ weights)
    if not exchanges:
        return x + h
    h = lax.all_to_all(h, EXPERT_AXIS, 0, 0, tiled=True)
    return x + h @ weights + 0.1 * lax.psum(x.mean(), EXPERT_AXIS)


def by_kind(is_so: jax.Array, run: Callable[[bool, Any], Any], loop: Any, separate: bool) -> Any:
    """Runs the block of one of two kinds on a loop's values (a common one, then some of each kind).

    Args:
        is_so: whether the block is of the second kind.
        run: function (kind, (common value, values of the kind)) -> the same, after the block.
        loop: (common value, values by kind).
        separate: whether each kind is in a ``cond`` of its own around its own values, or both are in the two branches
            of one ``cond`` around all values.
    """
    common, own = loop
    if not separate:

        def branch(kind: bool, common: Any, own: Any) -> Any:
            common, mine = run(kind, (common, own[kind]))
            return common, own | {kind: mine}

        return lax.cond(is_so, partial(branch, True), partial(branch, False), common, own)
    for kind in (False, True):
        common, mine = lax.cond(is_so == kind, partial(run, kind), lambda same: same, (common, own[kind]))
        own = own | {kind: mine}
    return common, own


def forward(weights: jax.Array, table: Table, tick: jax.Array, x: Any, stash: Any, separate: bool) -> Any:
    """F of a run of blocks: the output, and the stashes with every block's input."""
    slot = table.slot[tick]

    def one(row: jax.Array, loop: Any) -> Any:
        def run(kind: bool, loop: Any) -> Any:
            x, mine = loop
            return block(layer_of(weights, row), x, kind), put_layer([mine], slot, row, [x])[0]

        return by_kind(table.exchanges[row], run, loop, separate)

    first = table.first[tick]
    return lax.fori_loop(first, first + table.count[tick], one, (x, stash))


def weight(table: Table, tick: jax.Array, stash: Any, sums: Any, separate: bool) -> Any:
    """W of a run of blocks: the sums with each block's outer product of its stash added."""
    slot = table.slot[tick]

    def one(row: jax.Array, sums: Any) -> Any:
        def run(kind: bool, loop: Any) -> Any:
            x = take_layer([stash[kind]], slot, row)[0]
            return (), add_to_layer(loop[1], row, lax.psum(x.T @ x, EXPERT_AXIS) if kind else x.T @ x)

        return by_kind(table.exchanges[row], run, ((), sums), separate)[1]

    first = table.first[tick]
    return lax.fori_loop(first, first + table.count[tick], one, sums)


def program(shape: tuple[int, int, int], *, separate: bool = True) -> tuple[Callable[..., Any], Any]:
    """The jitted ticks of (weights [R, L, N, D, D], x [R, 1, N, T, D], table, number of ticks), and their mesh."""
    num_rows, num_tokens, dim = shape
    live = live_mesh(Topology(WORKERS, 1, RANKS), "emulated")

    def per_rank(weights: jax.Array, x: jax.Array, table: Table, num_ticks: jax.Array) -> Any:
        def empty(*shape: int) -> dict[bool, jax.Array]:
            return {kind: jnp.zeros(shape) for kind in (False, True)}

        start = State(x[0], empty(SLOTS, num_rows, num_tokens, dim), empty(num_rows, dim, dim))

        def tick(t: jax.Array, state: State) -> State:
            x, stash = lax.cond(
                table.op[t] == FORWARD,
                lambda *mine: forward(weights, table, t, *mine, separate),
                lambda *mine: mine,
                *(state.x, state.stash),
            )
            sums = lax.cond(
                table.op[t] == WEIGHT,
                lambda sums: weight(table, t, stash, sums, separate),
                lambda sums: sums,
                state.sums,
            )
            return State(lax.ppermute(x, WORKER_AXIS, RING), stash, sums)

        end = lax.fori_loop(0, num_ticks[0], tick, start)
        return end.x[None], end.sums

    specs = (RANKED, RANKED, SHARED, REPLICATED)
    return jax.jit(live.per_rank(per_rank, specs, RANKED)), live


def draw(random: np.random.Generator, shape: tuple[int, int, int], num_ticks: int) -> tuple[Any, Any, Table]:
    """Random weights, inputs and table."""
    num_rows, num_tokens, dim = shape
    weights = random.standard_normal((WORKERS, num_rows, RANKS, dim, dim)) / dim**0.5
    x = random.standard_normal((WORKERS, 1, RANKS, num_tokens, dim))
    first, end = np.sort(random.integers(0, num_rows + 1, (2, WORKERS, num_ticks)), axis=0)
    columns = random.integers(0, 3, (WORKERS, num_ticks)), first, end - first
    slot, exchanges = random.integers(0, SLOTS, (WORKERS, num_ticks)), random.random((WORKERS, num_rows)) < 0.5
    table = Table(*(np.asarray(column, np.int32) for column in (*columns, slot)), exchanges)
    return weights.astype(np.float32), x.astype(np.float32), table


def expected(weights: Any, x: Any, table: Table) -> tuple[Any, Any]:
    """The messages and the sums by NumPy, in float64."""
    weights, x = weights.astype(np.float64), x[:, 0].astype(np.float64)
    num_rows, (_, _, num_tokens, dim) = weights.shape[1], x.shape
    stash = np.zeros((WORKERS, 2, SLOTS, num_rows, RANKS, num_tokens, dim))
    sums = np.zeros((WORKERS, num_rows, RANKS, dim, dim))
    for t in range(table.op.shape[1]):
        for worker in range(WORKERS):
            op, first, count, slot = (column[worker, t] for column in table[:4])
            for row in range(first, first + count):
                kind = int(table.exchanges[worker, row])
                w, held = weights[worker, row], stash[worker, kind, slot]
                if op == FORWARD:
                    held[row] = here = x[worker]
                    h = np.tanh(here @ w)
                    if kind:
                        sent = h.reshape(RANKS, RANKS, -1, dim).swapaxes(0, 1).reshape(h.shape)
                        h = sent @ w + 0.1 * here.mean(axis=(1, 2)).sum()
                    x[worker] = here + h
                elif op == WEIGHT:
                    product = held[row].swapaxes(1, 2) @ held[row]
                    sums[worker, row] += product.sum(axis=0) if kind else product
        x = x[[source for source, _ in sorted(RING, key=lambda pair: pair[1])]]
    return x, sums


def trips(num_runs: int) -> dict[str, Any]:
    """Runs random tables; the largest difference from NumPy, relative to the largest value."""
    shape, num_ticks, random = (5, 8, 8), 12, np.random.default_rng(0)
    run, live = program(shape)
    worst = 0.0
    for _ in range(num_runs):
        weights, x, table = draw(random, shape, num_ticks)
        arguments = [live.put(tree, spec) for tree, spec in ((weights, RANKED), (x, RANKED), (table, SHARED))]
        x_after, sums = jax.device_get(run(*arguments, live.put(np.array([num_ticks], np.int32), REPLICATED)))
        for found, wanted in zip((x_after[:, 0], sums[False] + sums[True]), expected(weights, x, table), strict=True):
            worst = max(worst, float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max())))
    return {"runs": num_runs, "worst_difference": worst}


def copies(*, separate: bool) -> dict[str, Any]:
    """Copies of large arrays in the program of a large shape, outside of its entry."""
    shape = num_rows, num_tokens, dim = (6, 256, 256)
    run, _ = program(shape, separate=separate)
    arguments = [np.zeros((WORKERS, num_rows, RANKS, dim, dim), np.float32)]
    arguments.append(np.zeros((WORKERS, 1, RANKS, num_tokens, dim), np.float32))
    columns = [np.zeros((WORKERS, 4), np.int32)] * 4
    table = Table(*columns, np.zeros((WORKERS, num_rows), bool))
    compiled = run.lower(*arguments, table, np.array([4], np.int32)).compile()
    sizes = {"stash": f"f32[{SLOTS},{num_rows},{num_tokens},{dim}]", "sums": f"f32[{num_rows},{dim},{dim}]"}
    inside = _in_loops(compiled.as_text())
    found = {name: len(re.findall(rf"= {re.escape(size)}\S* copy\(", inside)) for name, size in sizes.items()}
    return found | {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def _in_loops(text: str) -> str:
    """The computations of a module other than its entry."""
    return "\n".join(part for part in text.split("\n\n") if not part.lstrip().startswith("ENTRY"))


def cpu_us() -> dict[str, float]:
    """CPU-microseconds by device and tick of tiny blocks."""
    shape, num_ticks = (8, 4, 4), 2_000
    run, live = program(shape)
    weights, x, _ = draw(np.random.default_rng(0), shape, 1)
    data = live.put(weights, RANKED), live.put(x, RANKED)

    def cost(op: int, count: int, exchanges: bool) -> float:
        ones = np.ones((WORKERS, num_ticks), np.int32)
        table = live.put(
            Table(op * ones, 0 * ones, count * ones, 0 * ones, np.full((WORKERS, 8), exchanges, bool)), SHARED
        )

        def seconds(ticks: int) -> float:
            end = live.put(np.array([ticks], np.int32), REPLICATED)
            call = lambda: run(*data, table, end)  # noqa: E731
            jax.block_until_ready(call())
            return statistics.median(cost_of(call) for _ in range(7))

        return 1e6 * (seconds(num_ticks) - seconds(1)) / num_ticks / live.mesh.size

    idle, empty = cost(NOTHING, 0, False), cost(FORWARD, 0, False)
    of_block = {kind: (cost(FORWARD, 8, moe) - empty) / 8 for kind, moe in (("dense", False), ("exchanging", True))}
    figures = {"idle_tick": idle, "op_of_no_block": empty - idle, **{f"{k}_block": v for k, v in of_block.items()}}
    return {name: round(value, 2) for name, value in figures.items()}


def weights_of_rows() -> dict[str, Any]:
    """CPU-seconds of 8 matmuls whose weights are a row of an array over the same unrolled, by number of tokens."""
    num_rows, dim, figures = 8, 512, {}
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((num_rows, dim, dim)) / dim**0.5, jnp.float32)
    for num_tokens in (64, 256, 1024):
        x = jnp.ones((num_tokens, dim))

        def looped(x: jax.Array, first: jax.Array) -> jax.Array:
            return lax.fori_loop(first, first + num_rows, lambda row, x: jnp.tanh(x @ weights[row]), x)

        def unrolled(x: jax.Array, first: jax.Array) -> jax.Array:
            del first
            for row in range(num_rows):
                x = jnp.tanh(x @ weights[row])
            return x

        calls = {name: repeated(jax.jit(f), x) for name, f in (("looped", looped), ("unrolled", unrolled))}
        costs = paired_costs(calls, 9)
        figures[f"{num_tokens} tokens"] = ratio(costs, "looped", "unrolled")
    return figures


def repeated(f: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
    """Calls a function 20 times, so that a call costs milliseconds."""
    return lambda: [f(x, jnp.int32(0)) for _ in range(20)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    num_runs = parser.parse_args().runs
    figures = {
        "trips": trips(num_runs),
        "copies": {name: copies(separate=name == "separate") for name in ("separate", "together")},
        "cpu_us": cpu_us(),
        "weights": weights_of_rows(),
    }
    claims: dict[str, tuple[float, float]] = {
        "largest difference from NumPy": (figures["trips"]["worst_difference"], 1e-4),
        "copies of a stash in the loop": (figures["copies"]["separate"]["stash"], 0),
        "copies of the sums in the loop": (figures["copies"]["separate"]["sums"], 0),
    }
    return publish("blocks of which every worker runs another number", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
