"""Routing: the interface of routers, and the parts that they share: gates, counts of choices, auxiliary losses.

``swift.experts.routers`` has the built-in routers.

Legend: T tokens, E experts, K choices of a token, X outputs of the router's matrix, D model dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from swift.errors import SettingError


class Number(NamedTuple):
    """A number for a layer and an iteration: a sum over all tokens, micro-batches, ranks and workers, or a mean.

    Both fields are summed. The result is the total, divided by the weight if there is one. A vector or matrix is a
    number for each of its elements.
    """

    total: jax.Array
    weight: jax.Array | None = None

    @classmethod
    def mean(cls, values_T: Float[Array, "T ..."], valid_T: Bool[Array, " T"]) -> "Number":
        """Returns the mean of the tokens' values, without padding; its total is this rank's."""
        values_T = values_T.astype(jnp.promote_types(values_T.dtype, jnp.float32))
        is_valid = valid_T.reshape(-1, *[1] * (values_T.ndim - 1))
        total = jnp.sum(jnp.where(is_valid, values_T, jnp.zeros_like(values_T)), axis=0)
        return cls(total, jnp.sum(valid_T, dtype=total.dtype))

    @property
    def value(self) -> jax.Array:
        """The result, from the sums of both fields; 0 if the weight is 0."""
        if self.weight is None:
            return self.total
        weight = self.weight.reshape(*self.weight.shape, *[1] * (self.total.ndim - self.weight.ndim))
        return self.total / jnp.where(weight == 0, jnp.ones_like(weight), weight)


class Routing(NamedTuple):
    """Experts and gates of a rank's tokens, before any token is dropped."""

    choices_TK: jax.Array  # int32; a token's choices differ from each other
    gates_TK: jax.Array  # weights of the experts' outputs, at least float32; 0 where there is no choice
    probs_TE: jax.Array  # scores normalized to a sum of 1, at least float32, for the auxiliary loss
    is_choice_TK: jax.Array | None = None  # False where a token has fewer than K experts; None if all have K
    numbers: Any = ()  # ``Number`` by name, to be recorded; their shapes depend neither on T nor on the noise


@dataclass(frozen=True)
class TokenNoise:
    """Random numbers for a rank's tokens in one layer and one micro-batch.

    They follow from the run's seed, the iteration, the sequence's place in the global batch and the layer, but not from
    the worker or rank. So a micro-batch that another worker runs after a failure gets the same numbers.

    Attributes:
        keys_B: random key of each sequence.
        sequence_length: tokens of a sequence.
    """

    keys_B: jax.Array
    sequence_length: int

    @classmethod
    def of(cls, words_B2: jax.Array, layer: Any, sequence_length: int) -> "TokenNoise":
        """Returns the noise of a layer.

        Args:
            words_B2: uint32, key of each sequence from the loader, see ``Batch.keys``.
            layer: number of the layer among the model's mixtures of experts, an int or int32[].
            sequence_length: tokens of a sequence.
        """
        keys_B = jax.random.wrap_key_data(words_B2, impl="threefry2x32")
        return cls(jax.vmap(jax.random.fold_in, (0, None))(keys_B, layer), sequence_length)

    def draw(self, sampler: Callable[..., jax.Array], *shape: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Draws an array ``[T, *shape]`` with a sampler of ``jax.random``, such as ``jax.random.normal``."""
        with jax.threefry_partitionable(True):  # a seed must give the same numbers regardless of JAX's default
            drawn = jax.vmap(lambda key: sampler(key, (self.sequence_length, *shape), dtype))(self.keys_B)
        return drawn.reshape(-1, *shape)


class RouterTokens(NamedTuple):
    """A rank's tokens of a micro-batch, as a router sees them."""

    logits_TX: jax.Array  # the tokens times the router's matrix, at least float32
    x_TD: jax.Array  # the tokens as the experts get them, in the compute dtype
    valid_T: jax.Array  # False for padding, whose choices are ignored
    state: Mapping[str, jax.Array]  # the layer's state, see ``Router.init_state``
    noise: TokenNoise | None = None  # None in evaluations and generation, and for routers that draw nothing


class Router:
    """Base class of routers: rules that choose the experts of each token.

    A router of one's own is a frozen dataclass that inherits from this class and defines ``route``; it is named in a
    configuration, as in ``ExpertConfig.router = @my_router.MyRouter()``. It is pure and has no arrays of its own: its
    weights are a matrix ``[D, X]`` without bias for each layer, and its state is arrays that change once an iteration.
    """

    draws_noise: ClassVar[bool] = False
    """Whether ``route`` uses ``RouterTokens.noise`` in training."""
    generates: ClassVar[bool] = True
    """Whether ``route_alone`` can choose experts for tokens one after the other."""

    def check(self, num_classes: int, top_k: int) -> None:
        """Raises SettingError if the router cannot work with this many experts and choices."""

    def check_generates(self) -> None:
        """Raises SettingError if the router has no rule for generation."""
        if not self.generates:
            allowed = "can only be trained: it chooses among the tokens of a batch, and generation has one at a time"
            raise SettingError("ExpertConfig.router", self, allowed)

    def num_logits(self, num_classes: int) -> int:
        """Returns the number of outputs of the router's matrix, X; the z-loss takes the first E for the logits."""
        return num_classes

    def most_choices(self, num_classes: int, top_k: int) -> int:
        """Returns the largest number of experts that a token may have, K."""
        del num_classes
        return top_k

    def most_pairs(self, num_tokens: int, num_classes: int, top_k: int) -> int:
        """Returns the largest number of choices that this many tokens may have together."""
        return num_tokens * self.most_choices(num_classes, top_k)

    def init_state(self, num_classes: int) -> dict[str, np.ndarray]:
        """Returns the state of a layer before the first iteration: named float arrays, an empty dict for none.

        The state is kept with the master weights and saved in checkpoints. ``route`` reads it in the compute dtype.
        """
        del num_classes
        return {}

    def update_state(self, state: Mapping[str, jax.Array], popularity_E: Int[Array, " E"]) -> Mapping[str, jax.Array]:
        """Returns the state of a layer after an iteration.

        Args:
            state: state in the iteration, at least float32.
            popularity_E: int32, choices of each expert in the iteration, over all micro-batches, ranks and workers.
        """
        del popularity_E
        return state

    def route(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """Chooses the experts of a rank's tokens; called while a step is traced.

        It may use the rank's other tokens, but no collectives.

        Args:
            tokens: the rank's tokens of a micro-batch.
            num_classes: number of experts, E.
            top_k: ``ExpertConfig.top_k``: experts of a token, on average if their number varies.
        """
        raise NotImplementedError(f"{type(self).__name__}.route")

    def route_alone(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """Chooses experts in generation, where tokens come one after the other; by default as in training."""
        return self.route(tokens, num_classes, top_k)

    def auxiliary_loss(
        self,
        routing: Routing,
        tokens: RouterTokens,
        popularity_E: Int[Array, " E"],
        num_tokens: jax.Array,
        top_k: int,
    ) -> Float[Array, ""]:
        """Computes this rank's term of a layer's auxiliary loss, by default of the load-balancing loss.

        The terms of all ranks are summed, and the loss is weighted by ``ExpertConfig.aux_loss_coefficient``.

        Args:
            routing: result of ``route``.
            tokens: the rank's tokens.
            popularity_E: int32, choices of each expert over all ranks, in this micro-batch.
            num_tokens: int32, tokens over all ranks.
            top_k: see ``route``.
        """
        return balance_loss(routing.probs_TE, tokens.valid_T, popularity_E, num_tokens, top_k)


def shares(logits: jax.Array) -> jax.Array:
    """Normalizes the logits' sigmoids to sum to 1, in the log domain because all of them may underflow to zero."""
    return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)


def count_choices(choices_TK: Int[Array, "T K"], counted_TK: Bool[Array, "T K"], num_classes: int) -> Int[Array, " E"]:
    """Counts the (token, choice) pairs of each expert, int32[E], among the pairs selected by ``counted_TK``."""
    is_class_TKE = choices_TK[..., None] == jnp.arange(num_classes, dtype=choices_TK.dtype)[None, None]
    return jnp.sum(is_class_TKE & counted_TK[..., None], axis=(0, 1), dtype=jnp.int32)


def renormalize_gates(gates_TK: Float[Array, "T K"], kept_TK: Bool[Array, "T K"]) -> Float[Array, "T K"]:
    """Divides the gates of a token's kept choices by their sum, as DeepSpeed does; a single choice keeps its gate."""
    if gates_TK.shape[1] == 1:
        return gates_TK
    kept_gates_TK = jnp.where(kept_TK, gates_TK, jnp.zeros_like(gates_TK))
    sum_T1 = jnp.sum(kept_gates_TK, axis=1, keepdims=True)
    return kept_gates_TK / jnp.maximum(sum_T1, jnp.finfo(gates_TK.dtype).eps)


def first_choice_loss(routing: Routing, valid_T: Bool[Array, " T"], num_ranks: int) -> Float[Array, ""]:
    """Computes this rank's term in DeepSpeed's auxiliary loss, which is the mean of a first-choice loss over ranks.

    A rank's loss is E * sum_e (share of its tokens whose first choice is e) * (mean probability of e).

    Args:
        routing: routing of this rank's tokens.
        valid_T: False for padding.
        num_ranks: number of ranks, N.
    """
    probs_TE = routing.probs_TE
    num_classes, tokens = probs_TE.shape[1], jnp.maximum(jnp.sum(valid_T, dtype=jnp.int32), 1).astype(probs_TE.dtype)
    first_E = count_choices(routing.choices_TK[:, :1], valid_T[:, None], num_classes).astype(probs_TE.dtype)
    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE, jnp.zeros_like(probs_TE)), axis=0)
    return num_classes * jnp.sum(first_E * sum_probs_E) / tokens**2 / num_ranks


def balance_loss(
    probs_TE: Float[Array, "T E"],
    valid_T: Bool[Array, " T"],
    popularity_E: Int[Array, " E"],
    num_tokens: jax.Array,
    top_k: int,
) -> Float[Array, ""]:
    """Computes this rank's term of the load-balancing loss.

    The loss is E * sum_e (share of choices of e) * (mean probability of e).

    Popularity is a count and has no gradient. The ranks' terms therefore sum to the loss, and their gradients to its
    gradient, without a collective that would have to be differentiated.

    Args:
        probs_TE: router probabilities of this rank's tokens.
        valid_T: False for padding.
        popularity_E: int32, choices of each expert over all expert ranks.
        num_tokens: int32, tokens over all expert ranks.
        top_k: number of experts per token.
    """
    tokens = jnp.maximum(num_tokens, 1).astype(probs_TE.dtype)
    share_E = popularity_E.astype(probs_TE.dtype) / (tokens * top_k)
    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE, jnp.zeros_like(probs_TE)), axis=0)
    return probs_TE.shape[1] * jnp.sum(share_E * sum_probs_E) / tokens


def z_loss(logits_TE: Float[Array, "T E"], valid_T: Bool[Array, " T"], num_tokens: jax.Array) -> Float[Array, ""]:
    """Computes this rank's term in the z-loss, the mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906).

    Args:
        logits_TE: output of the router for this rank's tokens.
        valid_T: False for padding.
        num_tokens: int32, tokens over all expert ranks.
    """
    wide_TE = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    squares_T = jnp.square(jax.nn.logsumexp(wide_TE, axis=-1))
    total = jnp.sum(jnp.where(valid_T, squares_T, jnp.zeros_like(squares_T)))
    return total / jnp.maximum(num_tokens, 1).astype(total.dtype)
