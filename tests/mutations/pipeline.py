"""Mistakes in the pipeline, in the collectives of a mesh, and in moves from one configuration to another."""

from tests.mutations.mutation import Mutation

LAW = ("tests/pipeline/test_law.py",)
CHUNKS = ("tests/pipeline/test_chunks.py",)
MOVES = ("tests/pipeline/test_state_move.py",)

MUTATIONS = (
    Mutation(
        "mesh/hlo_collectives.py",
        "min(results[-1], _op",
        "max(results[-1], _op",
        ("tests/mesh/test_hlo_collectives.py",),
    ),
    Mutation("pipeline/step/train_step.py", "iteration + 1, rank.ends", "iteration, rank.ends", LAW),
    Mutation(
        "pipeline/step/stage_ops.py",
        "cond_unless_static(is_first, added, lambda same: same, totals.embedding)",
        "totals.embedding",
        LAW,
    ),
    Mutation("pipeline/step/stage_ops.py", "sums, _add(head, d_head)", "sums, head", LAW),
    Mutation(
        "pipeline/step/stage_ops.py",
        "lambda total, value: total + value",
        "lambda total, value: total - value",
        LAW,
    ),
    Mutation("pipeline/step/interpreter.py", "op.opcode == Kind.W + 1", "op.opcode == Kind.F + 1", LAW),
    Mutation(
        "pipeline/step/update.py",
        "lambda: peer_sum(local_sum), lambda: local_sum) / divisor",
        "lambda: local_sum, lambda: local_sum) / divisor",
        LAW,
    ),
    Mutation(
        "pipeline/step/update.py",
        "jnp.minimum(1, spec.clip_norm / ",
        "jnp.maximum(1, spec.clip_norm / ",
        ("tests/pipeline/test_transactions.py", "tests/pipeline/test_barrier.py"),
    ),
    Mutation(
        "pipeline/step/train_step.py",
        "auxiliary_weight * self.divisor_K / spec.num_microbatches",
        "auxiliary_weight * self.divisor_K",
        LAW,
    ),
    Mutation(
        "pipeline/step/train_step.py",
        "ok = jnp.all(jnp.isfinite(norm_K) & (norm_K <= most))",
        "ok = jnp.all(jnp.isfinite(norm_K))",
        ("tests/pipeline/test_transactions.py",),
    ),
    Mutation("pipeline/step/tick_arrays.py", "(table.chunk_TR == 0)", "(table.chunk_TR >= 0)", CHUNKS),
    Mutation("pipeline/step/interpreter.py", "(op.own_slot >= 0)", "(op.own_slot >= 1)", CHUNKS),
    Mutation("pipeline/step/train_step.py", "leaf.at[index].set(0, mode", "leaf.at[index].add(0, mode", CHUNKS),
    Mutation(
        "pipeline/step/spec.py", "self.round_index == index, peer_sum,", "self.round_index < index, peer_sum,", CHUNKS
    ),
    Mutation(
        "pipeline/step/train_step.py",
        "jnp.where(ends.is_first, g, jnp.zeros_like(g))",
        "g",
        ("tests/pipeline/test_barrier.py",),
    ),
    Mutation("pipeline/reconfigure/transfer.py", "index_RL[worker] == block", "index_RL[worker] >= block", MOVES),
    Mutation(
        "pipeline/step/single_worker.py",
        "auxiliary_weight * divisor / spec.num_microbatches",
        "auxiliary_weight * divisor",
        ("tests/train/test_mathematics.py",),
    ),
    Mutation("pipeline/reconfigure/transfer.py", "[*former_rows, *self._order]", "self._order", MOVES),
    Mutation(
        "pipeline/reconfigure/transfer.py", "key = device, plan, _shapes_of(like)", "key = device, plan, ()", MOVES
    ),
    Mutation(
        "pipeline/reconfigure/engine.py",
        "prepared is not None or not move.has_blocks",
        "prepared is move or True",
        MOVES,
    ),
)
