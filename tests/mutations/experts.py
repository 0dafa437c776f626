"""Mistakes in routing, capacity by rank and by slot, the layer, the exchange, the update and placement."""

from tests.mutations.mutation import Mutation

DECODERS = ("tests/models/test_decoders.py",)
ROUTING = ("tests/experts/test_routing.py", "tests/models/test_oracles.py")
CAPACITY = (
    "tests/experts/capacity/test_token_split.py",
    "tests/experts/capacity/test_limits.py",
    "tests/experts/capacity/test_fixed_point.py",
)
TOKEN_ROWS = ("tests/experts/capacity/test_token_rows.py",)
ROW_EXCHANGE = ("tests/experts/capacity/test_token_exchange.py",)
LEAST_DROPS = ("tests/experts/capacity/test_least_drops.py",)
LAYER = ("tests/experts/test_layer.py",)
EXCHANGE = ("tests/experts/test_weight_exchange.py",)
PLACEMENT = ("tests/experts/placement",)
ROUTERS = ("tests/experts/test_routers.py",)
ROUTER_RUNS = ("tests/train/test_own_routers.py",)
LAW = ("tests/pipeline/test_law.py",)
OPTIMIZER = ("tests/experts/test_optimizer_config.py", "tests/models/test_oracles.py")

MUTATIONS = (
    Mutation(
        "experts/routers.py",
        "ranked_TE, -jnp.inf)\n        _, choices_TK = largest(lax",
        "ranked_TE, -jnp.inf)\n        _, choices_TK = largest(-lax",
        ROUTING,
    ),
    Mutation("experts/routers.py", "gates_TK = gates_TK / jnp.sum(", "gates_TK = 3 * gates_TK / jnp.sum(", ROUTING),
    Mutation(
        "experts/routers.py",
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
    Mutation("experts/weight_exchange.py", "(pairs >> 16).astype", "(pairs >> 8).astype", EXCHANGE),
    Mutation("experts/routing.py", "jnp.square(jax.nn.logsumexp(", "jnp.abs(jax.nn.logsumexp(", ROUTING),
    Mutation("experts/routers.py", "jnp.mean(counts_E) - counts_E", "jnp.mean(counts_E) + counts_E", ROUTING),
    Mutation("experts/routers.py", "gates_TK * self.gate_scale", "gates_TK / self.gate_scale", DECODERS),
    Mutation("experts/routers.py", "largest(scores_TGe, 1 if", "largest(-scores_TGe, 1 if", ROUTERS),
    Mutation("experts/routers.py", "+ std * tokens.noise.draw", "- std * tokens.noise.draw", ROUTERS),
    Mutation("experts/routers.py", "return offset_E - jnp.where(", "return offset_E + jnp.where(", ROUTERS),
    Mutation("experts/routers.py", "jnp.where(valid_T[:, None], shares_TE, -jnp.inf)", "shares_TE", ROUTERS),
    Mutation("experts/routers.py", "is_chosen_ET.T & tokens.valid_T[:, None]", "is_chosen_ET.T", ROUTERS),
    Mutation("experts/routers.py", "jnp.where(is_choice_TK, gates_TK, jnp.zeros_like(gates_TK))", "gates_TK", ROUTERS),
    Mutation("experts/routers.py", "num_tokens * top_k // num_classes", "num_tokens // num_classes", ROUTERS),
    Mutation("experts/routing.py", "jax.vmap(jax.random.fold_in, (0, None))(keys_B, layer)", "keys_B", ROUTERS),
    Mutation("experts/routing.py", "jnp.where(is_valid, values_T, jnp.zeros_like(values_T))", "values_T", ROUTERS),
    Mutation("experts/capacity/slot.py", "valid_A & is_choice_TK.reshape(-1)", "valid_A", ROUTER_RUNS),
    Mutation("experts/layer.py", "jnp.sum(valid_T, dtype=jnp.int32), axis)", "jnp.int32(valid_T.size), axis)", LAW),
    Mutation("experts/optimizer.py", "schedule(count + 1)", "schedule(count)", OPTIMIZER),
    Mutation("experts/optimizer.py", '"weight_decay": 0.1', '"weight_decay": 0.2', OPTIMIZER),
    Mutation("experts/optimizer.py", '"b2": 0.95', '"b2": 0.9', OPTIMIZER),
    Mutation(
        "experts/capacity/token_split.py",
        "lax.scan(give, ",
        "lax.scan(lambda g, s: (0 * g, give(g, s)[1]), ",
        CAPACITY,
    ),
    Mutation(
        "experts/capacity/token_split.py", "return assigned_M + ends_M, ends_M", "return so_far_M, ends_M", CAPACITY
    ),
    Mutation(
        "experts/capacity/token_split.py",
        "shares_NM << (BITS - _SHARE_BITS)",
        "shares_NM << (BITS - _SHARE_BITS - 1)",
        CAPACITY,
    ),
    Mutation(
        "experts/capacity/token_split.py",
        "ratio(buffer, load_ND, 1 << _RATIO_BITS)",
        "ratio(room, load_ND, 1 << _RATIO_BITS)",
        CAPACITY,
    ),
    Mutation("experts/capacity/rank.py", "room + 1), most) + 1", "room + 1), most)", CAPACITY),
    Mutation(
        "experts/capacity/rank.py",
        "counts_NE - by_class(kept_NDS), counts",
        "counts_NE - sent_NE, counts",
        CAPACITY,
    ),
    Mutation("experts/capacity/token_split.py", "+ (lowest >> _HALF)", "", CAPACITY),
    Mutation("experts/capacity/token_split.py", "(high + low) >> _HALF", "high >> _HALF", CAPACITY),
    Mutation("experts/capacity/rank.py", "axis=0, dtype=jnp.int32) - kept_NS", "axis=0, dtype=jnp.int32)", LAYER),
    Mutation(
        "experts/capacity/slot.py", "position_A // replicas_A, num_rows", "position_A % rows_per_slot, num_rows", LAYER
    ),
    Mutation(
        "experts/capacity/slot.py", "slot_class[:, None] < classes_1E", "slot_class[:, None] <= classes_1E", LAYER
    ),
    Mutation(
        "experts/capacity/slot.py",
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
        "experts/weight_exchange.py",
        "return lax.all_to_all(sent_LSNw, axis, split_axis=2, concat_axis=2)",
        "return lax.all_to_all(sent_LSNw, axis, split_axis=2, concat_axis=2)[:, :, ::-1]",
        EXCHANGE,
    ),
    Mutation("experts/weight_exchange.py", '"lnse,lsnw->lew"', '"lnse,lnsw->lew"', EXCHANGE),
    Mutation(
        "experts/grouped_matmul.py",
        "weights_SXY, groups, block, is_transposed=True)",
        "weights_SXY, groups, block)",
        ("tests/experts/test_grouped_matmul.py",),
    ),
    Mutation(
        "experts/grouped_matmul.py",
        "start_G[slot_I] + (tile_I - before_I) * height",
        "start_G[slot_I] + tile_I * height",
        ("tests/experts/test_grouped_matmul.py",),
    ),
    Mutation(
        "experts/grouped_matmul.py",
        "(i * step + _numbers(step) < size)[:, None]",
        "(i * step + _numbers(step) < num_slots * step)[:, None]",
        ("tests/experts/test_grouped_matmul.py",),
    ),
    Mutation(
        "experts/capacity/token_exchange.py",
        "counts_NN[rank], counts_NN[:, rank]",
        "counts_NN[:, rank], counts_NN[rank]",
        ROW_EXCHANGE,
    ),
    Mutation(
        "experts/capacity/token_exchange.py",
        "sent_N, starts_NN[rank], arr",
        "sent_N, starts_NN[:, rank], arr",
        ROW_EXCHANGE,
    ),
    Mutation(
        "experts/capacity/token_exchange.py", "sent, counts_NN.T, buffers", "sent, counts_NN, buffers", ROW_EXCHANGE
    ),
    Mutation("experts/capacity/token_exchange.py", "+ size - 1, 0) // size", ", 0) // size", ROW_EXCHANGE),
    Mutation(
        "experts/capacity/token_exchange.py",
        'known_platform() not in (None, "cpu")',
        'known_platform() == "tpu"',
        ROW_EXCHANGE,
    ),
    Mutation("experts/layer.py", "sent, counts_NN.T, buffers", "sent, counts_NN, buffers", LAYER),
    Mutation("experts/layer.py", "rows.counts_NN.T, buffers", "rows.counts_NN, buffers", LAYER),
    Mutation(
        "experts/capacity/token_rows.py",
        "jnp.where(goes_TN, position_TN, -1)",
        "position_TN",
        TOKEN_ROWS,
    ),
    Mutation("experts/layer.py", "num_ranks * num_tokens, num_served", "num_tokens, num_served", LAYER),
    Mutation("experts/capacity/token_rows.py", "gate_P[:, None].astype(d_YD.dtype) * _cop", "_cop", TOKEN_ROWS),
    Mutation("experts/capacity/token_rows.py", "counts_NN[:, rank], num", "counts_NN[rank], num", TOKEN_ROWS),
    Mutation("experts/capacity/balanced_flow.py", "load_N < room,", "load_N < room - 1,", LEAST_DROPS),
    Mutation("experts/placement/packed.py", "tokens_E / counts_E.astype", "tokens_E * counts_E.astype", PLACEMENT),
    Mutation("experts/placement/symi.py", "jnp.argmin(diff_E(counts_E))", "jnp.argmax(diff_E(counts_E))", PLACEMENT),
    Mutation(
        "experts/placement/packed.py", "jnp.argmin(jnp.where(filled_N", "jnp.argmax(jnp.where(filled_N", PLACEMENT
    ),
    Mutation("experts/placement/packed.py", "jnp.array([False, True])", "jnp.array([False, False])", PLACEMENT),
    Mutation(
        "experts/placement/packed.py", "helps = larger_M[other] < most", "helps = larger_M[other] > most", PLACEMENT
    ),
    Mutation("experts/placement/replicas.py", "if stray:", "if stray < 0:", PLACEMENT),
)
