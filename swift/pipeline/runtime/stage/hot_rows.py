"""Copies of what the embedding has for hot tokens: fetched before an iteration, their gradients sent after it.

All expert ranks of a worker begin and end an iteration at once, so what they exchange may be in a branch of a worker.

Legend: K iterations of the window, n micro-batches of a worker, H hot tokens of a rank, D model dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.models.vocabulary.embedding import Copies
from swift.models.vocabulary.hot_rows import add_gradients_of_copies, choose_hot_rows, fetch_copies
from swift.pipeline import scopes
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.update import where
from swift.pipeline.stage_weights import EmbeddingWeights, StageWeights


@dataclass(frozen=True)
class HotRows:
    """The hot tokens of a rank in each iteration of a window; without effect where a spec has none.

    Attributes:
        spec: step spec.
        hot_KH: int32, see ``choose_hot_rows``.
    """

    spec: StepSpec
    hot_KH: jax.Array

    @classmethod
    def choose(
        cls, spec: StepSpec, inputs_nBT: Int[Array, "n B T"], iteration_n: Int[Array, " n"], num_iterations: int
    ) -> "HotRows":
        """Chooses them by the tokens that this rank embeds.

        Args:
            spec: step spec.
            inputs_nBT: int32, tokens of this rank.
            iteration_n: int32, the iteration in which the worker embeds a micro-batch; -1: another worker does.
            num_iterations: K.
        """
        if not spec.num_hot_rows:
            return cls(spec, jnp.zeros((num_iterations, 0), jnp.int32))
        tokens_nT = inputs_nBT.reshape(len(inputs_nBT), -1)
        return cls(
            spec, choose_hot_rows(tokens_nT, iteration_n, num_iterations, spec.gpt.vocab_size, spec.num_hot_rows)
        )

    @property
    def no_copies(self) -> Any:
        """Zeros of the shape of the copies, ``[H, D]``; an empty tree where there are none."""
        shape = self.hot_KH.shape[1], self.spec.gpt.config.model_dim
        return jnp.zeros(shape, self.spec.compute_dtype) if self.spec.num_hot_rows else ()

    def at(self, iteration: Any, copies: Any) -> Copies | None:
        """The copies of an iteration, with the tokens that they are of."""
        return Copies(self.hot_KH[iteration], copies) if self.spec.num_hot_rows else None

    def fetch(self, slots: dict[str, jax.Array], iteration: Any, is_first: Any, copies: Any) -> Any:
        """Fetches the copies of an iteration.

        Args:
            slots: slots of this rank, with the weights that the iteration begins with.
            iteration: the iteration; beyond the window nothing is fetched.
            is_first: whether the worker embeds tokens; nothing is fetched where it does not.
            copies: copies to keep then.
        """
        if not self.spec.num_hot_rows:
            return copies

        def fetched() -> jax.Array:
            own = self.spec.gpt.slot_groups["embedding"].unpack_stack(slots["embedding"][:, 0])
            return fetch_copies(own["token_VD"][...][0], self.hot_KH[iteration], self.spec.live.num_ranks)

        with jax.named_scope(f"{scopes.COPIES}/embedding"):
            return where(is_first & (iteration < len(self.hot_KH)), fetched, lambda: copies)

    def collect(self, totals: StageWeights, iteration: Any, is_first: Any) -> StageWeights:
        """Adds the gradients of an iteration's copies to the embedding's, on their owners; of the first chunk."""
        spec = self.spec
        if not spec.num_hot_rows:
            return totals

        def added(embedding: EmbeddingWeights) -> EmbeddingWeights:
            own = jax.tree.map(lambda leaf: leaf, embedding.own)  # a copy of the tree, which is changed
            shares, hot_H = own["token_VD"], self.hot_KH[iteration]
            ranks, wire = spec.live.num_ranks, spec.row_wire_dtype
            total_vD = add_gradients_of_copies(shares[...][0], embedding.copies, hot_H, ranks, wire)
            own["token_VD"] = shares.replace(total_vD[None])
            return EmbeddingWeights(own, jnp.zeros_like(embedding.copies))

        with jax.named_scope(f"{scopes.UPDATE}/{scopes.COPIES}/embedding"):
            return totals._replace(embedding=where(is_first, added, lambda same: same, totals.embedding))
