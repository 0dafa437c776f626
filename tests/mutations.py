"""Mistakes that the quick tests find: one line of the package is made wrong, and the tests named have to fail.

    python tests/mutations.py                 # all of them, one after the other
    python tests/mutations.py routing split   # those of files with such names

A copy of the package is changed, never the package itself. A mutation that survives is a hole in the tests.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEADLINE_S = 900


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        path: the file in ``swift``.
        right: text that stands there once.
        wrong: what takes its place.
        tests: those that have to fail, as pytest takes them.
    """

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


ATTENTION = ("tests/models/test_attention.py",)
DECODERS = ("tests/models/test_decoders.py",)
GENERATION = ("tests/generate",)
ROUTING = ("tests/experts/test_routing.py", "tests/models/test_oracles.py")
CAPACITY = (
    "tests/experts/rank_capacity/test_token_split.py",
    "tests/experts/rank_capacity/test_limits.py",
    "tests/experts/rank_capacity/test_fixed_point.py",
)
ROW_EXCHANGE = ("tests/experts/rank_capacity/test_row_exchange.py",)
LEAST_DROPS = ("tests/experts/rank_capacity/test_least_drops.py",)
LAYER = ("tests/experts/test_layer.py",)
EXCHANGE = ("tests/experts/test_exchange.py",)
PLACEMENT = ("tests/experts/placement",)
OPTIMIZER = ("tests/experts/test_optimizer_config.py", "tests/models/test_oracles.py")
MODEL = ("tests/models/test_oracles.py",)
LOOK_UP = ("tests/models/vocabulary/test_row_look_up.py",)
ROW_SHARES = ("tests/models/vocabulary/test_row_shares.py",)
ROW_COPIES = ("tests/models/test_row_copies.py",)
LAW = ("tests/pipeline/test_law.py",)
CHUNKS = ("tests/pipeline/test_chunks.py",)
HALVES = ("tests/pipeline/test_split.py",)
SCHEDULES = ("tests/schedules/test_verify.py", "tests/schedules/test_schedule.py", "tests/schedules/test_bounds.py")
LOWERING = ("tests/schedules/test_lower.py",)
PLT = (
    "tests/checkpoint/test_lost_tokens.py",
    "swift/checkpoint/partial/selection.py",
    "swift/checkpoint/partial/lost_tokens.py",
)
BUDDIES = ("tests/checkpoint/test_peer_snapshots.py",)
DAMAGE = tuple(f"tests/checkpoint/test_{name}.py" for name in ("damage", "broken_off_saves", "arrays"))

MUTATIONS = (
    # What the plain model shares with the parallel one: no comparison of the two finds these.
    Mutation("experts/routing.py", "_, choices_TK = lax.top_k(lax", "_, choices_TK = lax.top_k(-lax", ROUTING),
    Mutation("experts/routing.py", "gates_TK = gates_TK / jnp.sum(", "gates_TK = 3 * gates_TK / jnp.sum(", ROUTING),
    Mutation(
        "experts/routing.py",
        "gates_TK = jnp.take_along_axis(scores_TE, choices_TK, axis=-1)",
        "gates_TK = 3 * jnp.take_along_axis(scores_TE, choices_TK, axis=-1)",
        ROUTING,
    ),
    Mutation(
        "experts/routing.py", "return probs_TE.shape[1] * jnp.sum(", "return -probs_TE.shape[1] * jnp.sum(", ROUTING
    ),
    Mutation("experts/routing.py", "/ (tokens * top_k)", "/ tokens", ROUTING),
    Mutation(
        "experts/routing.py",
        "(tokens * top_k)\n    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE,",
        "(tokens * top_k)\n    sum_probs_E = jnp.sum(jnp.where(True, probs_TE,",
        ROUTING,
    ),
    Mutation(
        "models/gpt.py",
        "return -jnp.sum(jnp.where(valid_BT, chosen",
        "return jnp.sum(jnp.where(valid_BT, chosen",
        MODEL,
    ),
    Mutation("models/gpt.py", "aux = aux + layer_aux", "aux = aux - layer_aux", MODEL),
    Mutation("models/modules.py", "jax.nn.gelu(up)", "jax.nn.relu(up)", MODEL),
    Mutation("models/attention/plain.py", "channels**-0.5", "channels**-1.0", ("tests/models",)),
    Mutation("models/attention/plain.py", "jnp.tril(jnp.ones(", "jnp.triu(jnp.ones(", ("tests/models",)),
    Mutation("models/attention/blockwise.py", "jnp.exp(highest - top)", "jnp.exp(top - highest)", ATTENTION),
    Mutation("models/attention/blockwise.py", "- _take(mean, here)[..., None]", "", ATTENTION),
    Mutation("models/attention/plain.py", "document_BT[:, :, None] ==", "document_BT[:, :, None] >=", ATTENTION),
    Mutation("models/gpt.py", "dtype=jnp.int32) - ends_BT", "dtype=jnp.int32)", ATTENTION),
    Mutation("models/modules.py", "return position_1T - lax", "return position_1T - 0 * lax", ATTENTION),
    Mutation("models/vocabulary/row_look_up.py", "(position_X < self.buffer_size)", "(position_X < 1)", LOOK_UP),
    Mutation(
        "models/vocabulary/row_look_up.py", "jnp.where(is_hot_X[:, None],", "jnp.where(~is_hot_X[:, None],", LOOK_UP
    ),
    Mutation("models/vocabulary/row_look_up.py", "most = lax.pmax(jnp.max(", "most = lax.pmax(jnp.min(", LOOK_UP),
    Mutation("models/vocabulary/hot_rows.py", "most_KH > 1", "most_KH > 0", LOOK_UP),
    Mutation(
        "models/vocabulary/hot_rows.py",
        "iteration_n < 0, num_iterations, iteration_n",
        "iteration_n < 0, 0, iteration_n",
        LOOK_UP,
    ),
    Mutation("models/vocabulary/row_shares.py", "self.row_size), 1, 3)", "self.row_size), 1, 2)", ROW_SHARES),
    Mutation("experts/exchange.py", "(pairs >> 16).astype", "(pairs >> 8).astype", EXCHANGE),
    Mutation("models/row_copies.py", "self.start + row * self.row_size", "row * self.row_size", ROW_COPIES),
    Mutation("pipeline/runtime/train_step.py", "iteration + 1, rank.ends", "iteration, rank.ends", LAW),
    Mutation(
        "pipeline/runtime/stage/hot_rows.py",
        "where(is_first, added, lambda same: same, totals.embedding)",
        "totals.embedding",
        LAW,
    ),
    Mutation("models/rope.py", "first * cos - second * sin", "first * cos + second * sin", DECODERS),
    Mutation("models/modules.py", "jax.nn.silu(", "jax.nn.gelu(", DECODERS),
    Mutation("models/modules.py", "x_BTD + self.shared(normed_BTD)", "x_BTD - self.shared(normed_BTD)", DECODERS),
    Mutation("experts/routing.py", "jnp.square(jax.nn.logsumexp(", "jnp.abs(jax.nn.logsumexp(", ROUTING),
    Mutation("experts/routing.py", "keepdims=True) - counts_LE)", "keepdims=True) + counts_LE)", ROUTING),
    Mutation("experts/routing.py", "gates_TK * gating.scale", "gates_TK / gating.scale", DECODERS),
    Mutation("generate/paged_model.py", "<= position_RC[:", "< position_RC[:", GENERATION),
    Mutation("generate/radix_tree.py", "pages[held:].copy()", "pages[held:]", GENERATION),
    Mutation("generate/passages.py", "draft.mark_computed(last + 1)", "pass", GENERATION),
    Mutation("generate/sampling.py", "sums_BK > uniform_B", "sums_BK >= 1 - uniform_B", GENERATION),
    Mutation("experts/optimizer_config.py", "schedule(count + 1)", "schedule(count)", OPTIMIZER),
    Mutation("experts/optimizer_config.py", '"weight_decay": 0.1', '"weight_decay": 0.2', OPTIMIZER),
    Mutation("experts/optimizer_config.py", '"b2": 0.95', '"b2": 0.9', OPTIMIZER),
    # Capacity by rank.
    Mutation(
        "experts/rank_capacity/token_split.py",
        "lax.scan(give, ",
        "lax.scan(lambda g, s: (0 * g, give(g, s)[1]), ",
        CAPACITY,
    ),
    Mutation(
        "experts/rank_capacity/token_split.py", "return given_M + ends_M, ends_M", "return so_far_M, ends_M", CAPACITY
    ),
    Mutation(
        "experts/rank_capacity/token_split.py",
        "shares_NM << (BITS - _SHARE_BITS)",
        "shares_NM << (BITS - _SHARE_BITS - 1)",
        CAPACITY,
    ),
    Mutation(
        "experts/rank_capacity/token_split.py",
        "ratio(buffer, load_ND, 1 << _RATIO_BITS)",
        "ratio(room, load_ND, 1 << _RATIO_BITS)",
        CAPACITY,
    ),
    Mutation("experts/rank_capacity/limits.py", "room + 1), most) + 1", "room + 1), most)", CAPACITY),
    Mutation(
        "experts/rank_capacity/limits.py",
        "counts_NE - by_class(kept_NDS), counts",
        "counts_NE - sent_NE, counts",
        CAPACITY,
    ),
    Mutation("experts/rank_capacity/fixed_point.py", "+ (lowest >> _HALF)", "", CAPACITY),
    Mutation("experts/rank_capacity/fixed_point.py", "(high + low) >> _HALF", "high >> _HALF", CAPACITY),
    Mutation(
        "experts/rank_capacity/buffers.py", "axis=0, dtype=jnp.int32) - kept_NS", "axis=0, dtype=jnp.int32)", LAYER
    ),
    # Capacity by slot, the layer and the exchange.
    Mutation(
        "experts/slot_capacity.py", "position_A // replicas_A, num_rows", "position_A % rows_per_slot, num_rows", LAYER
    ),
    Mutation(
        "experts/slot_capacity.py", "slot_class[:, None] < classes_1E", "slot_class[:, None] <= classes_1E", LAYER
    ),
    Mutation(
        "experts/slot_capacity.py",
        "return take_rows(dy_YD, inverse_X, index_Y)",
        "return take_rows(dy_YD, index_Y, inverse_X)",
        LAYER,
    ),
    Mutation(
        "experts/layer.py",
        "popularity_E = lax.psum(pairs.popularity_E, axis)",
        "popularity_E = pairs.popularity_E",
        ("tests/train/test_mathematics.py",),
    ),
    Mutation(
        "experts/exchange.py",
        "return lax.all_to_all(sent_LSNw, axis, split_axis=2, concat_axis=2)",
        "return lax.all_to_all(sent_LSNw, axis, split_axis=2, concat_axis=2)[:, :, ::-1]",
        EXCHANGE,
    ),
    Mutation("experts/exchange.py", '"lnse,lsnw->lew"', '"lnse,lnsw->lew"', EXCHANGE),
    Mutation(
        "experts/grouped_matmul.py",
        "weights_SXY.swapaxes(1, 2), groups, block)\n",
        "weights_SXY, groups, block)\n",
        ("tests/experts/test_grouped_matmul.py",),
    ),
    Mutation(
        "experts/rank_capacity/row_exchange.py",
        "counts_NN[own], counts_NN[:, own]",
        "counts_NN[:, own], counts_NN[own]",
        ROW_EXCHANGE,
    ),
    Mutation(
        "experts/rank_capacity/row_exchange.py",
        "sent_N, starts_NN[own], arr",
        "sent_N, starts_NN[:, own], arr",
        ROW_EXCHANGE,
    ),
    Mutation(
        "experts/rank_capacity/row_exchange.py", "mine, counts_NN.T, buffers", "mine, counts_NN, buffers", ROW_EXCHANGE
    ),
    Mutation("experts/rank_capacity/row_exchange.py", "+ size - 1, 0) // size", ", 0) // size", ROW_EXCHANGE),
    Mutation(
        "experts/rank_capacity/row_exchange.py", 'device.platform != "cpu"', 'device.platform == "tpu"', ROW_EXCHANGE
    ),
    Mutation("experts/layer.py", "counts_NN.T, buffers", "counts_NN, buffers", LAYER),
    Mutation(
        "mesh/hlo_collectives.py",
        "min(results[-1], _op",
        "max(results[-1], _op",
        ("tests/mesh/test_hlo_collectives.py",),
    ),
    Mutation("experts/rank_capacity/balanced_flow.py", "load_N < room,", "load_N < room - 1,", LEAST_DROPS),
    # Placement.
    Mutation("experts/placement/minmax.py", "tokens_E / counts_E.astype", "tokens_E * counts_E.astype", PLACEMENT),
    Mutation("experts/placement/symi.py", "jnp.argmin(diff_E(counts_E))", "jnp.argmax(diff_E(counts_E))", PLACEMENT),
    Mutation(
        "experts/placement/packed.py", "jnp.argmin(jnp.where(filled_N", "jnp.argmax(jnp.where(filled_N", PLACEMENT
    ),
    Mutation("experts/placement/packed.py", "jnp.array([False, True])", "jnp.array([False, False])", PLACEMENT),
    Mutation(
        "experts/placement/packed.py", "helps = larger_M[other] < most", "helps = larger_M[other] > most", PLACEMENT
    ),
    Mutation("experts/placement/soundness.py", "if stray:", "if stray < 0:", PLACEMENT),
    # The pipeline.
    Mutation("pipeline/runtime/stage/stage_ops.py", "sums, add(head, d_head)", "sums, head", LAW),
    Mutation(
        "pipeline/runtime/stage/stage_ops.py",
        "lambda total, value: total + value",
        "lambda total, value: total - value",
        LAW,
    ),
    Mutation("pipeline/runtime/interpreter.py", "op.opcode == Kind.W + 1", "op.opcode == Kind.B + 1", LAW),
    Mutation(
        "pipeline/runtime/update.py",
        "lambda: peer_sum(mine), lambda: mine) / divisor",
        "lambda: mine, lambda: mine) / divisor",
        LAW,
    ),
    Mutation(
        "pipeline/runtime/update.py",
        "jnp.minimum(1, spec.clip_norm / ",
        "jnp.maximum(1, spec.clip_norm / ",
        ("tests/pipeline/test_transactions.py", "tests/pipeline/test_barrier.py"),
    ),
    Mutation(
        "pipeline/runtime/rank_context.py",
        "auxiliary_weight * self.divisor_K / spec.num_microbatches",
        "auxiliary_weight * self.divisor_K",
        LAW,
    ),
    Mutation(
        "pipeline/runtime/train_step.py",
        "ok = jnp.all(jnp.isfinite(norm_K) & (norm_K <= most))",
        "ok = jnp.all(jnp.isfinite(norm_K))",
        ("tests/pipeline/test_transactions.py",),
    ),
    Mutation("pipeline/runtime/tick_arrays.py", "(table.chunk_TR == 0)", "(table.chunk_TR >= 0)", CHUNKS),
    Mutation("pipeline/runtime/interpreter.py", "(op.own_slot >= 0)", "(op.own_slot >= 1)", CHUNKS),
    Mutation("pipeline/runtime/chunk_layers.py", "leaf.at[index].set(0, mode", "leaf.at[index].add(0, mode", CHUNKS),
    Mutation("pipeline/chunk_rounds.py", "self.turn == turn, peer_sum,", "self.turn < turn, peer_sum,", CHUNKS),
    Mutation(
        "pipeline/runtime/rank_context.py",
        "jnp.where(ends.is_first, g, jnp.zeros_like(g))",
        "g",
        ("tests/pipeline/test_barrier.py",),
    ),
    Mutation(
        "pipeline/reconfigure/block_transfer.py", "index_RL[worker] == block", "index_RL[worker] >= block", CHUNKS
    ),
    Mutation(
        "pipeline/runtime/single_worker.py",
        "auxiliary_weight * divisor / spec.num_microbatches",
        "auxiliary_weight * divisor",
        ("tests/train/test_mathematics.py",),
    ),
    # Schedules.
    Mutation(
        "schedules/rules.py",
        "(end[order][:-1] > start[order][1:] + table.tolerance)",
        "(end[order][:-1] > start[order][1:] + 1e9)",
        SCHEDULES,
    ),
    Mutation(
        "schedules/rules.py",
        "for op in np.argwhere((count_3KDMP != 1) & exists_DM[:, :, None]):",
        "for op in np.argwhere((count_3KDMP > 1) & exists_DM[:, :, None]):",
        SCHEDULES,
    ),
    Mutation(
        "schedules/lowering/ticks.py",
        "back = Kind.B if schedule.problem.decoupled else Kind.W",
        "back = Kind.B",
        LOWERING,
    ),
    Mutation(
        "schedules/lowering/ticks.py",
        "np.maximum.at(length_T, tick_n, durations(schedule))",
        "np.minimum.at(length_T, tick_n, durations(schedule))",
        LOWERING,
    ),
    Mutation("schedules/lowering/lower.py", "np.append(0, last_ticks + 1)", "np.append(0, last_ticks)", LOWERING),
    # Checkpoints.
    Mutation(
        "checkpoint/partial/selection.py",
        "np.lexsort((saved_at_LE, -unsaved_LE), axis=-1)",
        "np.lexsort((saved_at_LE, unsaved_LE), axis=-1)",
        PLT,
    ),
    Mutation(
        "checkpoint/partial/selection.py",
        "return (turn_L + k) % max",
        "return (turn_L + 1) % max",
        (*PLT, "tests/checkpoint/test_partial.py"),
    ),
    Mutation("checkpoint/partial/lost_tokens.py", "popularity_LE - dropped_LE,", "popularity_LE,", PLT),
    Mutation("checkpoint/partial/lost_tokens.py", "plt <= budget else", "plt >= budget else", PLT),
    Mutation(
        "checkpoint/memory/peer_snapshots.py", "self.step_CLE.argmin(axis=0)", "self.step_CLE.argmax(axis=0)", BUDDIES
    ),
    Mutation("checkpoint/memory/peer_snapshots.py", "(rank + 1) % num_ranks", "rank", BUDDIES),
    Mutation(
        "checkpoint/storage/directory.py",
        "for step in steps[:-num_kept]:",
        "for step in steps[:0]:",
        ("tests/checkpoint/test_partial.py", *DAMAGE),
    ),
    Mutation(
        "checkpoint/storage/directory.py",
        "if newer > step:",
        "if newer >= step:",
        ("tests/checkpoint", "tests/elastic/services/test_checkpoint_service_trouble.py"),
    ),
)


def main(names: Sequence[str] = ()) -> int:
    """Applies the mutations of some files, all unless named, and says which survive; 1 if any does."""
    chosen = [one for one in MUTATIONS if not names or any(name in one.path for name in names)]
    survivors, sound = list[Mutation](), set[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("swift", "tests", "experiments", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        (copy / ".jax_cache").symlink_to(ROOT / ".jax_cache")  # of programs; a mutated one is another
        for mutation in chosen:
            begun = time.monotonic()
            if mutation.tests not in sound:
                assert not fails(mutation.tests, copy), f"without a mutation, too, some of {mutation.tests} fail"
                sound.add(mutation.tests)
            is_found = found(mutation, copy)
            verdict = "found" if is_found else "SURVIVES"
            print(
                f"{verdict} in {time.monotonic() - begun:3.0f} s: {mutation.path}: {mutation.wrong.strip()}", flush=True
            )
            if not is_found:
                survivors.append(mutation)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found")
    return 1 if survivors else 0


def found(mutation: Mutation, copy: Path) -> bool:
    """Whether one of the tests fails in a copy of the tree that has the mutation; the copy is as before afterwards."""
    path = copy / "swift" / mutation.path
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        return fails(mutation.tests, copy)
    finally:
        path.write_text(text)


def fails(tests: Sequence[str], copy: Path) -> bool:
    """Whether one of some tests fails in a copy of the tree, or hangs."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *tests]
    try:
        ended = subprocess.run(pytest, cwd=copy, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert ended.returncode in (0, 1, 2), ended.stdout + ended.stderr  # 2: a file can no longer be imported
    return ended.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
