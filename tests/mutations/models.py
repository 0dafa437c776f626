"""Mistakes in the models and in generation, many of which the plain model shares with the parallel one."""

from tests.mutations.mutation import Mutation

ATTENTION = ("tests/models/test_attention.py",)
DECODERS = ("tests/models/test_decoders.py",)
GENERATION = ("tests/generate",)
MODEL = ("tests/models/test_oracles.py",)
LOOK_UP = ("tests/models/vocabulary/test_row_look_up.py",)
ROW_SHARES = ("tests/models/vocabulary/test_row_shares.py",)
ROW_COPIES = ("tests/models/test_row_copies.py",)

MUTATIONS = (
    Mutation(
        "models/losses.py",
        "return -jnp.sum(weighted(jnp.where(valid_R, chosen",
        "return jnp.sum(weighted(jnp.where(valid_R, chosen",
        MODEL,
    ),
    Mutation("models/gpt.py", "aux = aux + layer_aux", "aux = aux - layer_aux", MODEL),
    Mutation("models/modules.py", "jax.nn.gelu(up)", "jax.nn.relu(up)", MODEL),
    Mutation(
        "models/attention_kernels.py",
        "    wide, scale = at_least_float32(query_BTHC.dtype), channels**-0.5",
        "    wide, scale = at_least_float32(query_BTHC.dtype), channels**-1.0",
        ("tests/models",),
    ),
    Mutation("models/attention_kernels.py", "jnp.tril(jnp.ones(", "jnp.triu(jnp.ones(", ("tests/models",)),
    Mutation("models/attention_kernels.py", "jnp.exp(highest - top)", "jnp.exp(top - highest)", ATTENTION),
    Mutation("models/attention_kernels.py", "- _take(mean, query_block)[..., None]", "", ATTENTION),
    Mutation("models/attention_kernels.py", "document_BT[:, :, None] ==", "document_BT[:, :, None] >=", ATTENTION),
    Mutation("models/gpt.py", "dtype=jnp.int32) - ends_BT", "dtype=jnp.int32)", ATTENTION),
    Mutation("models/modules.py", "return position_1T - lax", "return position_1T - 0 * lax", ATTENTION),
    Mutation("models/vocabulary/lookup.py", "(position_X < self.buffer_size)", "(position_X < 1)", LOOK_UP),
    Mutation("models/vocabulary/lookup.py", "jnp.where(is_hot_X[:, None],", "jnp.where(~is_hot_X[:, None],", LOOK_UP),
    Mutation("models/vocabulary/lookup.py", "most = lax.pmax(jnp.max(", "most = lax.pmax(jnp.min(", LOOK_UP),
    Mutation("models/vocabulary/lookup.py", "most_KH > 1", "most_KH > 0", LOOK_UP),
    Mutation(
        "models/vocabulary/lookup.py",
        "iteration_n < 0, num_iterations, iteration_n",
        "iteration_n < 0, 0, iteration_n",
        LOOK_UP,
    ),
    Mutation("models/vocabulary/layouts.py", "self.row_size), 1, 3)", "self.row_size), 1, 2)", ROW_SHARES),
    Mutation("models/parameters.py", "self.start + row * self.row_size", "row * self.row_size", ROW_COPIES),
    Mutation("models/rope.py", "first * cos - second * sin", "first * cos + second * sin", DECODERS),
    Mutation("models/modules.py", "jax.nn.silu(", "jax.nn.gelu(", DECODERS),
    Mutation("models/modules.py", "x_BTD + self.shared(normed_BTD)", "x_BTD - self.shared(normed_BTD)", DECODERS),
    Mutation("generate/paged_model.py", "<= position_RC[:", "< position_RC[:", GENERATION),
    Mutation("generate/texts.py", "pages[num_matched:].copy()", "pages[num_matched:]", GENERATION),
    Mutation("generate/paged_model.py", "sequence.mark_computed(last + 1)", "pass", GENERATION),
    Mutation("generate/request.py", "sums_BK > uniform_B", "sums_BK >= 1 - uniform_B", GENERATION),
)
