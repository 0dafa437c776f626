"""Forward pass over a paged KV cache, and the planning of its calls.

A page holds the keys and values of one token. A call processes passages, which are chunks of consecutive tokens of a
text: tokens that have not been computed yet in prefill, or the last token of each text in decoding. Each layer writes
the keys and values of all passages before it reads any. A passage may therefore depend on another one in the same call:
a long text can be split into several passages, and texts can share a prefix that the same call computes.

The experts may be distributed over devices; everything else is replicated.

Legend: P pages, R passages, C tokens of a passage, N columns of a page table, H heads, K key-value heads,
G = H / K query heads for each key-value head, W channels of a head, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.errors import SettingError, check_count
from swift.experts.config import ExpertConfig
from swift.experts.dropless import sorted_moe
from swift.experts.layer import Load
from swift.generate.texts import Node, TokenSequence
from swift.mesh.per_rank import EXPERT_AXIS
from swift.models.gpt import GPT, Weights

COLUMNS_PER_BLOCK = 64
"""Number of page table columns that attention reads at once; the width of a table is a multiple of it."""


class Passages(NamedTuple):
    """Passages of a call as arrays with fixed shapes; rows with count 0 are empty."""

    token_RC: jax.Array  # int32
    page_RC: jax.Array  # int32, page to which each token's keys and values are written; P to write nothing
    first_R: jax.Array  # int32, position of the first token
    count_R: jax.Array  # int32, number of tokens
    table_RN: jax.Array  # int32, page of every position of the text
    label_RC: jax.Array  # int32, token to score as the successor of each token; -1 for none


class Scores(NamedTuple):
    """Results of a call: logits for sampling, and the labels' scores."""

    logits_RV: jax.Array  # after each passage's last token, at least float32
    log_prob_RC: jax.Array  # log-probability of each label; 0 without a label
    likeliest_RC: jax.Array  # bool, whether the label is the likeliest token


Pages: TypeAlias = tuple[jax.Array, ...]
"""Keys (index 0) and values (1), [P, 2, K, W]; an array for each layer, so that updating one does not copy others."""


_EXPERT_RANKS = "TextEngineConfig.expert_ranks"


def check_expert_ranks(num_ranks: int, num_classes: int) -> None:
    """Raises SettingError unless the experts can be divided evenly over ``num_ranks``; does not initialize JAX."""
    check_count(_EXPERT_RANKS, num_ranks, least=1)
    if num_classes % num_ranks:
        raise SettingError(_EXPERT_RANKS, num_ranks, f"must divide {num_classes}, the number of experts")


def check_devices(num_ranks: int) -> None:
    """Raises SettingError unless JAX has ``num_ranks`` devices, including emulated ones; one rank is not checked."""
    if num_ranks == 1:
        return
    num_devices = len(jax.devices())
    if num_ranks > num_devices:
        raise SettingError(_EXPERT_RANKS, num_ranks, f"must be at most {num_devices}, the number of devices")


def rank_mesh(num_ranks: int, num_classes: int) -> Mesh | None:
    """Returns a mesh of expert ranks on the first devices, or None for one rank, which needs no mesh.

    Raises:
        SettingError: the experts cannot be divided evenly, or there are too few devices.
    """
    check_expert_ranks(num_ranks, num_classes)
    if num_ranks == 1:
        return None
    check_devices(num_ranks)
    return Mesh(np.array(jax.devices()[:num_ranks]), (EXPERT_AXIS,))


def on_every(ranks: Mesh | None) -> NamedSharding | None:
    """Returns the replicated sharding on a mesh of ranks, or None without a mesh."""
    return None if ranks is None else NamedSharding(ranks, PartitionSpec())


def spread_experts(gpt: GPT, weights: Weights, ranks: Mesh | None) -> Weights:
    """Places weights so that each rank has an equal, contiguous share of every layer's experts, and all other weights.

    Expert weights on the host are sent only to their own rank, so no device needs memory for all experts.
    """
    if ranks is None:
        return jax.device_put(weights)
    shares = NamedSharding(ranks, PartitionSpec(EXPERT_AXIS))
    return {
        name: jax.device_put(layers, shares if gpt.groups[name].is_expert else on_every(ranks))
        for name, layers in weights.items()
    }


def empty_pages(gpt: GPT, num_pages: int, dtype: DTypeLike, sharding: NamedSharding | None = None) -> Pages:
    """Allocates an empty KV cache with the given sharding."""
    config = gpt.config
    shape = (num_pages, 2, config.kv_heads, config.channels)
    return tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(config.num_layers))


@partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def extend(
    gpt: GPT, experts: ExpertConfig, weights: Weights, pages: Pages, passages: Passages, ranks: Mesh | None = None
) -> tuple[Scores, Pages]:
    """Runs the model on passages of tokens, and writes their keys and values to the cache.

    Args:
        gpt: architecture of the model.
        experts: settings of the experts; routing is dropless.
        weights: weights of whole experts.
        pages: KV cache; it is donated.
        passages: passages to compute.
        ranks: mesh of the expert ranks on which ``weights`` are placed; None for one device.

    Returns:
        (scores, the updated KV cache).
    """
    column_C = jnp.arange(passages.token_RC.shape[1], dtype=jnp.int32)
    valid_RC = column_C[None] < passages.count_R[:, None]
    position_RC = jnp.where(valid_RC, passages.first_R[:, None] + column_C[None], 0)
    page_RC = jnp.where(valid_RC, passages.page_RC, len(pages[0]))
    x_RCD, extended = gpt.embed(weights, passages.token_RC, position_RC), []
    for pages_P2KW, layer in zip(pages, gpt.layers(weights, gpt.config.moe_layers), strict=True):
        attention = gpt.groups["attention"].module(layer["attention"])
        query_RCHW, *new = attention.project(x_RCD, position_RC)
        new_RC2KW = jnp.stack(new, axis=2).astype(pages_P2KW.dtype)
        extended.append(pages_P2KW.at[page_RC].set(new_RC2KW, mode="drop"))
        mixed_RCHW = _paged_attention(query_RCHW, extended[-1], passages.table_RN, position_RC)
        x_RCD = x_RCD + attention.out(mixed_RCHW.reshape(*mixed_RCHW.shape[:2], -1))
        x_RCD, _, _ = gpt.feed_forward(layer, x_RCD, valid_RC, partial(_mixture, gpt, experts, ranks))
    last_R = jnp.maximum(passages.count_R - 1, 0)
    last_R1D = jnp.take_along_axis(x_RCD, last_R[:, None, None], axis=1)
    log_prob_RC, likeliest_RC = _label_scores(gpt, weights, x_RCD, passages.label_RC)
    return Scores(gpt.logits(weights, last_R1D)[:, 0], log_prob_RC, likeliest_RC), tuple(extended)


def _paged_attention(
    query_RCHW: Float[Array, "R C H W"],
    pages_P2KW: Float[Array, "P 2 K W"],
    table_RN: Int[Array, "R N"],
    position_RC: Int[Array, "R C"],
) -> Float[Array, "R C H W"]:
    """Computes causal attention over the pages of each passage's text.

    Pages are read one block of table columns at a time, up to the largest position, with an online softmax: the running
    sum is rescaled whenever a block has a larger score (arXiv 1805.02867).

    Args:
        query_RCHW: queries.
        pages_P2KW: keys and values of a layer.
        table_RN: page of every position of the passage's text.
        position_RC: position of each query, which sees positions up to and including its own.
    """
    passages, length, heads, channels = query_RCHW.shape
    kv_heads = pages_P2KW.shape[2]
    wide = jnp.promote_types(query_RCHW.dtype, jnp.float32)
    query_RCKGW = query_RCHW.reshape(passages, length, kv_heads, heads // kv_heads, channels)
    column_N = jnp.arange(COLUMNS_PER_BLOCK, dtype=jnp.int32)
    rows_PX = pages_P2KW.reshape(len(pages_P2KW), -1)  # flat rows, which XLA:CPU gathers in half the time

    def add_block(block: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, Any, Any]:
        largest, total, mixed = state
        first = block * COLUMNS_PER_BLOCK
        page_RN = lax.dynamic_slice_in_dim(table_RN, first, COLUMNS_PER_BLOCK, axis=1)
        pages_RN2KW = rows_PX[page_RN].reshape(*page_RN.shape, *pages_P2KW.shape[1:])
        scores = jnp.einsum("rckgw,rnkw->rkgcn", query_RCKGW, pages_RN2KW[:, :, 0], preferred_element_type=wide)
        sees_RCN = first + column_N[None, None] <= position_RC[:, :, None]
        scores = jnp.where(sees_RCN[:, None, None], scores * channels**-0.5, -jnp.inf)
        larger = jnp.maximum(largest, scores.max(axis=-1))
        decay, shares = jnp.exp(largest - larger), jnp.exp(scores - larger[..., None])
        shares_of_values = shares.astype(pages_P2KW.dtype), pages_RN2KW[:, :, 1]
        added = jnp.einsum("rkgcn,rnkw->rkgcw", *shares_of_values, preferred_element_type=wide)
        return larger, total * decay + shares.sum(axis=-1), mixed * decay[..., None] + added

    shape = (passages, kv_heads, heads // kv_heads, length)
    # Start from a finite minimum. Every query sees column 0, so after the first block the maximum is a real score.
    start = jnp.full(shape, jnp.finfo(wide).min, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, channels), wide)
    num_blocks = position_RC.max() // COLUMNS_PER_BLOCK + 1
    _, total, mixed = lax.fori_loop(0, num_blocks, add_block, start)
    mixed_RCKGW = jnp.moveaxis(mixed / total[..., None], 3, 1)
    return mixed_RCKGW.reshape(passages, length, heads, channels).astype(query_RCHW.dtype)


def _mixture(
    gpt: GPT,
    experts: ExpertConfig,
    ranks: Mesh | None,
    logits_TX: Any,
    x_TD: Any,
    valid_T: Any,
    state: Any,
    router_state: Any,
) -> Any:
    def run(logits_TX: Any, x_TD: Any, valid_T: Any, state: Any, router_state: Any) -> jax.Array:
        module, num_ranks = gpt.groups["expert"].module(state), 1 if ranks is None else ranks.size
        return sorted_moe(experts, logits_TX, x_TD, valid_T, module, router_state, num_ranks)

    if ranks is not None:
        replicated = PartitionSpec()
        specs = (replicated, replicated, replicated, PartitionSpec(EXPERT_AXIS), replicated)
        # check_vma=False, because the grouped matmul's loops start from replicated zeros that become rank-varying.
        run = jax.shard_map(run, mesh=ranks, in_specs=specs, out_specs=replicated, check_vma=False)
    y_TD = run(logits_TX, x_TD, valid_T, state, router_state)
    none = jnp.zeros(experts.num_classes, jnp.int32)
    return y_TD, jnp.zeros((), logits_TX.dtype), Load(none, none, none)


def _label_scores(
    gpt: GPT, weights: Weights, x_RCD: jax.Array, label_RC: jax.Array
) -> tuple[Float[Array, "R C"], jax.Array]:
    """Computes (log-probability of each label, whether it is the likeliest token), [R, C].

    Skipped if there are no labels; otherwise computed one passage at a time, so that only one passage's logits [C, V]
    are in memory.
    """
    dtype = jnp.promote_types(x_RCD.dtype, jnp.float32)

    def passage(x_CD: jax.Array, label_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_CV = gpt.logits(weights, x_CD[None])[0]
        chosen_C = jnp.take_along_axis(logits_CV, jnp.maximum(label_C, 0)[:, None], axis=1)[:, 0]
        log_prob_C = chosen_C - jax.nn.logsumexp(logits_CV, axis=1)
        return jnp.where(label_C >= 0, log_prob_C, 0), jnp.argmax(logits_CV, axis=1) == label_C

    def score() -> tuple[jax.Array, jax.Array]:
        return lax.map(lambda arrays: passage(*arrays), (x_RCD, label_RC))

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(label_RC.shape, dtype), jnp.zeros(label_RC.shape, bool)

    return lax.cond((label_RC >= 0).any(), score, skip)


@dataclass(eq=False)
class Passage:
    """Passage in a call: consecutive tokens of a text that are computed together.

    Attributes:
        sequence: text of the passage.
        first: position of the first token.
        end: position after the last token.
        num_written: number of the text's first tokens whose keys and values are already in the cache and are not
            written again.
        scored: range of the request's tokens to score; each is scored with the logits of the token before it.
        continued: texts whose next token is chosen from the logits of the passage's last token.
    """

    sequence: TokenSequence
    first: int
    end: int
    num_written: int
    scored: range = range(0)
    continued: list[TokenSequence] = field(default_factory=list)


def plan_passages(sequences: Iterable[TokenSequence], most_passages: int, passage_length: int) -> list[Passage]:
    """Plans a prefill call: splits the tokens of running texts that are not computed yet into passages.

    Tokens that several texts share are computed for the first of these texts. The others need not wait, since a call
    may read what it writes. Identical texts share the logits, too. For every text, at least the last token is computed,
    because its logits are needed, and all tokens whose successors are scored.

    Args:
        sequences: running texts, in the order in which they are prefilled.
        most_passages: maximum number of passages of the call, R.
        passage_length: maximum number of tokens of a passage, C.
    """
    passages: list[Passage] = []
    ends: dict[Node, Passage] = {}
    for sequence in sequences:
        while not sequence.is_read:
            same = None if sequence.node is None or _unscored(sequence) else ends.get(sequence.node)
            if same is None and len(passages) == most_passages:
                return passages
            passage = same or _next_passage(sequence, passage_length)
            if same is None:
                passages.append(passage)
            if passage.end == len(sequence.tokens):
                sequence.is_read = True
                passage.continued.append(sequence)
                if sequence.node is not None:
                    ends[sequence.node] = passage
    return passages


def decoding_passages(sequences: Iterable[TokenSequence]) -> list[Passage]:
    """Plans a decoding call: the last token of every text."""
    passages = []
    for sequence in sequences:
        last = len(sequence.tokens) - 1
        passages.append(Passage(sequence, last, last + 1, last, continued=[sequence]))
        sequence.mark_computed(last + 1)
    return passages


def as_arrays(
    passages: Sequence[Passage], num_passages: int, passage_length: int, num_columns: int, nowhere: int
) -> Passages:
    """Collects passages into NumPy arrays of fixed shapes, padded with empty rows.

    Args:
        passages: at most ``num_passages`` passages.
        num_passages: number of rows of the arrays, R.
        passage_length: maximum number of tokens of a passage, C.
        num_columns: number of columns of a page table, N.
        nowhere: page number for tokens that are not written to the cache, P.
    """
    token_RC, page_RC, label_RC = (np.full((num_passages, passage_length), fill, np.int32) for fill in (0, nowhere, -1))
    first_R, count_R = np.zeros(num_passages, np.int32), np.zeros(num_passages, np.int32)
    table_RN = np.zeros((num_passages, num_columns), np.int32)
    for row, passage in enumerate(passages):
        sequence, first, count = passage.sequence, passage.first, passage.end - passage.first
        first_R[row], count_R[row], table_RN[row] = first, count, sequence.table
        token_RC[row, :count] = sequence.tokens[first : passage.end]
        written = max(0, passage.num_written - first)
        page_RC[row, written:count] = sequence.table[first + written : passage.end]
        scored = passage.scored
        if scored:
            label_RC[row, _columns(passage)] = sequence.answer.request.tokens[scored.start : scored.stop]
    return Passages(token_RC, page_RC, first_R, count_R, table_RN, label_RC)  # type: ignore[arg-type]


def note_scores(passage: Passage, log_prob_C: np.ndarray, is_likeliest_C: np.ndarray) -> None:
    """Appends a passage's scores to its text's answer."""
    answer, columns = passage.sequence.answer, _columns(passage)
    answer.text_log_probs = np.concatenate([answer.text_log_probs, log_prob_C[columns]])
    answer.is_likeliest = np.concatenate([answer.is_likeliest, is_likeliest_C[columns]])


def _columns(passage: Passage) -> slice:
    """Returns the columns of a passage whose next tokens are scored."""
    return slice(passage.scored.start - 1 - passage.first, passage.scored.stop - 1 - passage.first)


def _unscored(sequence: TokenSequence) -> range:
    """Returns the range of the request's tokens that still have to be scored."""
    request = sequence.answer.request
    if request.scored_from is None:
        return range(0)
    return range(request.scored_from + len(sequence.answer.text_log_probs), len(request.tokens))


def _next_passage(sequence: TokenSequence, passage_length: int) -> Passage:
    computed, unscored = sequence.num_computed, _unscored(sequence)
    needed_from = min(len(sequence.tokens), unscored.start if unscored else len(sequence.tokens)) - 1
    first = max(sequence.num_read, min(computed, needed_from))
    end = min(first + passage_length, len(sequence.tokens))
    begin = max(first + 1, unscored.start)
    scored = range(begin, max(begin, min(end + 1, unscored.stop))) if unscored else range(0)
    sequence.mark_computed(end)
    sequence.num_read = end
    return Passage(sequence, first, end, computed, scored)
