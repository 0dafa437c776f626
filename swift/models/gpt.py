"""GPT model: one forward pass, used by parallel runs, the reference model and generation.

The pass is divided into three functions where pipelines cut it: ``embed``, ``block`` (one layer; ``stage`` runs
several) and ``head_loss``. The caller passes in the function that computes a mixture of experts: expert-parallel over
ranks, or the reference on one device.

Legend: B sequences, T positions, D model dim, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from swift.experts.layer import Load
from swift.experts.routers import TopK
from swift.experts.routing import Router
from swift.models.attention import Attention
from swift.models.config import AttentionKernel, ModelConfig
from swift.models.losses import sum_of_losses
from swift.models.modules import Embedding, Head, Mlp, RouterModule, make_network, positions_within
from swift.models.own_block import check_block
from swift.models.parameters import Group, draw_parameters
from swift.models.vocabulary.layouts import share_size
from swift.models.vocabulary.lookup import HotRowCache, embed, embedding_gradient
from swift.models.vocabulary.sharded_loss import sharded_loss_sum

Weights = dict[str, list[Any]]
"""Module states by group, one for each layer; the states of experts have a leading dim for slots or experts."""

StackedWeights = dict[str, Any]
"""Module states by group, stacked over the layers: ``[layers, ...]``, or ``[layers, slots, ...]`` for experts."""

MoeFunction = Callable[..., tuple[jax.Array, jax.Array, Load]]
"""Function (index of the MoE layer, logits_TX, x_TD, valid_T, the layer's expert state, the router's state) -> (y_TD,
auxiliary loss, load)."""

_BlockMoeFunction = Callable[..., tuple[jax.Array, jax.Array, Load]]
"""``MoeFunction`` for a given layer, without its first argument."""

BLOCK_GROUPS: Mapping[bool, tuple[str, ...]] = {False: ("attention", "mlp"), True: ("attention", "router", "expert")}
"""Groups of a block's modules; the key is whether the block is a mixture of experts."""


@dataclass(frozen=True)
class GPT:
    """Architecture of a GPT; its parameters are separate, one array ``[layers, experts, size]`` per group.

    Attributes:
        config: shape of the model.
        vocab_size: number of rows of the embedding and columns of the head, V.
        num_classes: number of experts of a mixture, E.
        kernel: attention kernel for whole sequences.
        router: router of the mixtures, which decides the shapes of its weights and state.
        separator: token that ends a document; positions then see only their own document. None if they see earlier
            documents of the sequence, too.
        has_slices: whether a stage has slices of all experts, ``[layers, experts, w]``, instead of whole experts in
            slots.
        head_ranks: number of expert ranks that share the columns of the head's matrix; 1 if the head is whole.
        embedding_ranks: number of expert ranks that share the rows of the embedding; 1 if the embedding is whole.
        groups: groups of all modules, by name.
        slot_groups: same groups with the shapes that a rank's slots have: embedding and head may be shares.
    """

    config: ModelConfig
    vocab_size: int
    num_classes: int
    kernel: AttentionKernel = "plain"
    router: Router = field(default_factory=TopK)
    separator: int | None = None
    has_slices: bool = False
    head_ranks: int = 1
    embedding_ranks: int = 1
    groups: Mapping[str, Group] = field(init=False, repr=False, compare=False)
    slot_groups: Mapping[str, Group] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_block(self.config)
        config, num_moe = self.config, sum(self.config.moe_layers)
        network = partial(make_network, config, config.expert_width)
        groups = [
            Group("embedding", 1, 1, lambda rngs: Embedding(config, self.vocab_size, rngs)),
            Group("attention", config.num_layers, 1, self._attention),
            Group("mlp", config.num_layers - num_moe, 1, lambda rngs: Mlp(config, rngs)),
            Group("router", num_moe, 1, lambda rngs: RouterModule(config, self.router, self.num_classes, rngs)),
            Group("expert", num_moe, self.num_classes, network, is_expert=True),
            Group("head", 1, 1, lambda rngs: Head(config, self.vocab_size, rngs)),
        ]
        object.__setattr__(self, "groups", {group.name: group for group in groups if group.num_layers})
        shares = {
            name: Group(name, 1, 1, partial(module, config, share_size(self.vocab_size, ranks)))
            for name, module, ranks in (("embedding", Embedding, self.embedding_ranks), ("head", Head, self.head_ranks))
            if ranks > 1
        }
        object.__setattr__(self, "slot_groups", {**self.groups, **shares})

    def _attention(self, rngs: nnx.Rngs) -> nnx.Module:
        block = self.config.block
        return Attention(self.config, self.kernel, rngs) if block is None else block.attention(self.config, rngs)

    def flops_per_token(self, top_k: int) -> int:
        """Computes the FLOPs per token, forward and backward: 6 per matrix weight that it uses, plus attention.

        As in PaLM (arXiv 2204.02311, appendix B), attention is counted as if unmasked, and recomputation and padding
        are not counted. For a user's own block only the matrices are counted.

        Args:
            top_k: number of experts that a token is sent to.
        """
        used = {"expert": top_k, "embedding": 0}
        weights = sum(g.num_layers * g.matrix_size * used.get(name, 1) for name, g in self.groups.items())
        weights += self.vocab_size * self.config.model_dim * self.config.tied_embeddings
        attention = self.config.num_heads * self.config.channels * self.config.sequence_length
        return 6 * weights + (12 * self.config.num_layers * attention if self.config.block is None else 0)

    @property
    def num_parameters(self) -> int:
        """Number of parameters over all experts and layers."""
        return sum(group.num_layers * group.num_classes * group.size for group in self.groups.values())

    @property
    def head_groups(self) -> tuple[str, ...]:
        """Names of the groups that logits and loss are computed from."""
        return ("head", "embedding") if self.config.tied_embeddings else ("head",)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initializes the parameters, float32 ``[layers, experts, size]`` for each group."""
        return draw_parameters(self.groups, key)

    @property
    def parameter_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the arrays from ``init``, without tracing it, which would create all modules in full size."""
        return {name: group.stack_shape for name, group in self.groups.items()}

    @property
    def weight_shapes(self) -> Weights:
        """Shapes of the whole model's weights, float32, as ``jax.ShapeDtypeStruct``."""
        return jax.eval_shape(self.unpack, self.parameter_shapes)

    def unpack(self, packed: Mapping[str, jax.Array | np.ndarray]) -> Weights:
        """Unpacks ``[layers, slots or experts, size]`` for each group into the weights that the forward pass reads."""
        weights: Weights = {}
        for name, group in self.groups.items():
            layers = [packed[name][layer] for layer in range(packed[name].shape[0])]
            weights[name] = [group.unpack(layer if group.is_expert else layer[0]) for layer in layers]
        return weights

    def pack(self, weights: Weights) -> dict[str, jax.Array]:
        """Packs weights into one array per group: the inverse of ``unpack``."""
        packed = {}
        for name, group in self.groups.items():
            layers = [group.pack(state) for state in weights[name]]
            packed[name] = jnp.stack([layer if group.is_expert else layer[None] for layer in layers])
        return packed

    def unpack_stacks(self, packed: Mapping[str, jax.Array]) -> StackedWeights:
        """Unpacks ``[layers, slots, size]`` of each group into stacks for a loop over layers; slices stay packed."""

        def unpacked(name: str, group: Group) -> Any:
            if group.is_expert:
                return packed[name] if self.has_slices else group.unpack_stack(packed[name])
            return group.unpack_stack(packed[name][:, 0])

        return {name: unpacked(name, group) for name, group in self.slot_groups.items()}

    def pack_stacks(self, weights: StackedWeights) -> dict[str, jax.Array]:
        """Packs stacked weights into one array per group: the inverse of ``unpack_stacks``."""
        packed = {
            name: weights[name] if group.is_expert and self.has_slices else group.pack_stack(weights[name])
            for name, group in self.slot_groups.items()
        }
        return {name: stack if self.groups[name].is_expert else stack[:, None] for name, stack in packed.items()}

    def embed(
        self,
        weights: Weights,
        tokens_BT: jax.Array,
        position_BT: jax.Array | None = None,
        copies: HotRowCache | None = None,
    ) -> jax.Array:
        """Embeds int32 tokens as x_BTD.

        If no positions are given, they are counted from 0, in each document if documents are separated.
        """
        position_BT = self._positions(tokens_BT) if position_BT is None else position_BT
        group, state = self.slot_groups["embedding"], weights["embedding"][0]
        return embed(group, state, copies, tokens_BT, position_BT, self.embedding_ranks)

    def embedding_gradient(
        self, weights: Weights, tokens_BT: jax.Array, copies: HotRowCache | None, d_x_BTD: jax.Array, wire: DTypeLike
    ) -> tuple[Any, jax.Array]:
        """Computes the gradients of the embedding's state and the hot-row copies, given x_BTD's gradient."""
        group, state, position_BT = self.slot_groups["embedding"], weights["embedding"][0], self._positions(tokens_BT)
        return embedding_gradient(group, state, copies, tokens_BT, position_BT, d_x_BTD, self.embedding_ranks, wire)

    def _positions(self, tokens_BT: jax.Array) -> jax.Array | None:
        """Returns positions that restart in each document, int32[B, T], or None if they are simply counted from 0."""
        document_BT = self.documents(tokens_BT)
        return None if document_BT is None or self.config.positions != "learned" else positions_within(document_BT)

    def documents(self, tokens_BT: jax.Array) -> jax.Array | None:
        """Returns the document number of each position, int32[B, T], or None if documents are not separated."""
        if self.separator is None:
            return None
        ends_BT = (tokens_BT == self.separator).astype(jnp.int32)
        return jnp.cumsum(ends_BT, axis=1, dtype=jnp.int32) - ends_BT

    def layers(self, weights: Weights, pattern: Sequence[bool]) -> list[dict[str, Any]]:
        """Returns each layer's weights by group; the pattern is True for each layer that is a mixture of experts."""
        layers, counts = [], {True: 0, False: 0}
        for layer, is_moe in enumerate(pattern):
            index = counts[is_moe]
            counts[is_moe] += 1
            layers.append({n: weights[n][layer if n == "attention" else index] for n in BLOCK_GROUPS[is_moe]})
        return layers

    def stage(
        self,
        weights: Weights,
        pattern: Sequence[bool],
        x_BTD: jax.Array,
        valid_BT: jax.Array,
        moe: MoeFunction,
        document_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, list[Load]]:
        """Runs the layers of a stage.

        Args:
            weights: weights of this stage's layers only.
            pattern: True for each layer of the stage that is a mixture of experts.
            x_BTD: residual stream.
            valid_BT: False for padding.
            moe: function that computes a mixture of experts.
            document_BT: see ``documents``.

        Returns:
            (x_BTD, sum of the layers' auxiliary losses, load of each MoE layer).
        """
        aux = jnp.zeros((), jnp.promote_types(x_BTD.dtype, jnp.float32))
        loads: list[Load] = []
        for layer in self.layers(weights, pattern):
            x_BTD, layer_aux, load = self.block(layer, x_BTD, valid_BT, partial(moe, len(loads)), document_BT)
            aux = aux + layer_aux
            if load is not None:
                loads.append(load)
        return x_BTD, aux, loads

    def block(
        self,
        weights: Mapping[str, Any],
        x_BTD: jax.Array,
        valid_BT: jax.Array,
        moe: _BlockMoeFunction,
        document_BT: jax.Array | None = None,
        wrap_attention: Callable[[Any], Any] | None = None,
    ) -> tuple[jax.Array, jax.Array, Load | None]:
        """Runs one block: attention, then a dense network or a mixture of experts.

        Args:
            weights: states of the block's modules, by group; ``BLOCK_GROUPS`` lists the groups of each kind of block.
            x_BTD: residual stream.
            valid_BT: False for padding.
            moe: function that computes a mixture of experts.
            document_BT: see ``documents``.
            wrap_attention: transformation to apply to attention as a function of arrays, such as ``jax.checkpoint``;
                None for none.

        Returns:
            (x_BTD, auxiliary loss, load of the experts, or None for a dense block).
        """

        def attention(state: Any, x_BTD: jax.Array, document_BT: jax.Array | None) -> jax.Array:
            return self.groups["attention"].module(state)(x_BTD, document_BT)

        attend = attention if wrap_attention is None else wrap_attention(attention)
        x_BTD = x_BTD + attend(weights["attention"], x_BTD, document_BT)
        return self.feed_forward(weights, x_BTD, valid_BT, moe)

    def feed_forward(
        self, weights: Mapping[str, Any], x_BTD: jax.Array, valid_BT: jax.Array, moe: _BlockMoeFunction
    ) -> tuple[jax.Array, jax.Array, Load | None]:
        """Runs the part of a block after attention; see ``block`` for arguments and result."""
        if "mlp" in weights:
            no_aux = jnp.zeros((), jnp.promote_types(x_BTD.dtype, jnp.float32))
            return x_BTD + self.groups["mlp"].module(weights["mlp"])(x_BTD), no_aux, None
        router = self.groups["router"].module(weights["router"])
        normed, logits = router(x_BTD)
        flat, logits_TX = normed.reshape(-1, x_BTD.shape[-1]), logits.reshape(-1, logits.shape[-1])
        names = self.router.init_state(self.num_classes)
        state = {name: lax.stop_gradient(getattr(router, name)[...]) for name in names}
        y, aux, load = moe(logits_TX, flat, valid_BT.reshape(-1), weights["expert"], state)
        return router.add_shared(x_BTD + y.reshape(x_BTD.shape), normed), aux, load

    def logits(self, weights: Weights, x_BTD: jax.Array) -> jax.Array:
        """Computes logits_BTV, at least float32, from the residual stream after the last layer."""
        head, kernel_DV = self._head(weights)
        return head(x_BTD, kernel_DV)

    def _head(self, weights: Weights) -> tuple[Head, jax.Array]:
        """Returns (the head's module, its matrix), from the weights of ``head_groups``."""
        head = self.groups["head"].module(weights["head"][0])
        if not self.config.tied_embeddings:
            return head, head.out.kernel[...]
        return head, self.groups["embedding"].module(weights["embedding"][0]).token_VD[...].T

    def head_loss(
        self,
        weights: Weights,
        x_BTD: jax.Array,
        labels_BT: jax.Array,
        valid_BT: jax.Array,
        loss_weight_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Sums the valid tokens' cross-entropies, in nats; only one chunk of the logits is in memory at a time.

        With a sharded head, ``weights`` has only this rank's columns, and all ranks must have equally many tokens.
        ``loss_weight_BT`` are factors of the tokens' losses; None if all are 1.
        """
        head, kernel_DV = self._head(weights)
        x_RD = head.norm(x_BTD).reshape(labels_BT.size, -1)
        tokens = x_RD, kernel_DV, labels_BT.reshape(-1), valid_BT.reshape(-1)
        weight_R = None if loss_weight_BT is None else loss_weight_BT.reshape(-1)
        if self.head_ranks > 1:
            return sharded_loss_sum(*tokens, self.vocab_size, weight_R)
        return sum_of_losses(*tokens, weight_R)
