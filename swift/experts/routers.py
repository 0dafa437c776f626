"""The built-in routers: top-k with softmax or sigmoid, with noise, balanced by Sinkhorn, and expert choice.

Legend: T tokens, E experts, K choices of a token, G groups of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from swift.errors import SettingError, check_choices, check_count, check_number
from swift.experts.routing import Router, RouterTokens, Routing, shares
from swift.largest import largest

_MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class TopK(Router):
    """Sends every token to the K experts with the largest logits, or with the largest biased scores.

    By default the gate of a single choice is the expert's probability (Switch); the gates of several choices are
    normalized to sum to 1 (GShard).

    Attributes:
        scores: ``softmax`` of the logits over the experts, or each expert's own ``sigmoid``.
        normalize_gates: whether the gates of a token's experts are divided by their sum; None for only if
            ``ExpertConfig.top_k`` is above 1.
        gate_scale: factor by which gates are multiplied.
        bias_update_rate: step by which an expert's bias changes after an iteration: it rises for experts below the mean
            load and falls for experts above it. The bias is added to the scores when experts are chosen, but not to the
            gates, and has no gradient (arXiv 2408.15664). None for no bias.
        num_groups: number of equal groups of consecutive experts, G; a token's experts are in few of them (DeepSeek).
        top_groups: number of groups that a token's experts may be in.
        group_score: what groups are chosen by: the ``max`` of their scores, or the sum of the two largest (``top2``).
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_gates: bool | None = None
    gate_scale: float = 1.0
    bias_update_rate: float | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.normalize_gates not in (None, True, False):
            raise SettingError("TopK.normalize_gates", self.normalize_gates, "must be True, False or None")
        check_number("TopK.gate_scale", self.gate_scale, above=0)
        if self.bias_update_rate is not None:
            check_number("TopK.bias_update_rate", self.bias_update_rate, least=0)
        check_count("TopK.num_groups", self.num_groups, least=1)
        check_count("TopK.top_groups", self.top_groups, least=1, most=self.num_groups)

    def check(self, num_classes: int, top_k: int) -> None:
        """Raises SettingError if the groups are not equal, or too small for the choices."""
        group_size, rest = divmod(num_classes, self.num_groups)
        if rest:
            allowed = f"must divide ExpertConfig.num_classes = {num_classes}"
            raise SettingError("TopK.num_groups", self.num_groups, allowed)
        if self.num_groups == 1 and self.group_score != "max":
            raise SettingError("TopK.group_score", self.group_score, "needs TopK.num_groups above 1")
        if self.group_score == "top2" and group_size < 2:
            raise SettingError("TopK.group_score", "top2", "needs groups of at least two experts")
        if self.top_groups * group_size < top_k:
            allowed = f"groups of {group_size} experts each have too few for ExpertConfig.top_k = {top_k}"
            raise SettingError("TopK.top_groups", self.top_groups, allowed)

    def normalizes(self, top_k: int) -> bool:
        """Whether the gates of a token sum to ``gate_scale``."""
        return top_k > 1 if self.normalize_gates is None else self.normalize_gates

    def init_state(self, num_classes: int) -> dict[str, np.ndarray]:
        """Returns biases of zero, or an empty dict without a bias."""
        return {} if self.bias_update_rate is None else {"bias_E": np.zeros(num_classes, np.float32)}

    def update_state(self, state: Mapping[str, jax.Array], popularity_E: Int[Array, " E"]) -> Mapping[str, jax.Array]:
        """Raises the biases of experts below the mean load, and lowers those of experts above it.

        Only the sign of the difference from the mean matters, not its size (arXiv 2408.15664, algorithm 1).
        """
        if self.bias_update_rate is None:
            return state
        counts_E = popularity_E.astype(state["bias_E"].dtype)
        return {"bias_E": state["bias_E"] + self.bias_update_rate * jnp.sign(jnp.mean(counts_E) - counts_E)}

    def route(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """See ``Router.route``."""
        del num_classes
        return self.choose(tokens.logits_TX, top_k, tokens.state.get("bias_E"))

    def choose(self, logits_TE: Float[Array, "T E"], top_k: int, bias_E: Float[Array, " E"] | None = None) -> Routing:
        """Chooses experts by their logits, at least float32, and biases."""
        is_softmax = self.scores == "softmax"
        scores_TE = jax.nn.softmax(logits_TE, axis=-1) if is_softmax else jax.nn.sigmoid(logits_TE)
        # Without a bias, experts are ranked by logits, because scores may underflow to zero and tie.
        ranked_TE = logits_TE if bias_E is None else scores_TE + bias_E.astype(scores_TE.dtype)[None]
        if self.num_groups > 1:
            biased_TE = ranked_TE if self.group_score == "max" or bias_E is not None else scores_TE
            ranked_TE = jnp.where(self._in_top_groups(biased_TE), ranked_TE, -jnp.inf)
        _, choices_TK = largest(lax.stop_gradient(ranked_TE), top_k)
        gates_TK = jnp.take_along_axis(scores_TE, choices_TK, axis=-1)
        if self.normalizes(top_k) and is_softmax:
            gates_TK = gates_TK / jnp.sum(gates_TK, axis=-1, keepdims=True)
        elif self.normalizes(top_k):
            gates_TK = shares(jnp.take_along_axis(logits_TE, choices_TK, axis=-1))
        if self.gate_scale != 1:
            gates_TK = gates_TK * self.gate_scale
        return Routing(choices_TK, gates_TK, scores_TE if is_softmax else shares(logits_TE))

    def _in_top_groups(self, scores_TE: jax.Array) -> jax.Array:
        """Returns whether each expert is in one of its token's best groups, bool[T, E]."""
        scores_TGe = scores_TE.reshape(len(scores_TE), self.num_groups, -1)
        best_TGe, _ = largest(scores_TGe, 1 if self.group_score == "max" else 2)
        _, groups_Tg = largest(jnp.sum(best_TGe, axis=-1), self.top_groups)
        is_top_TG = jnp.any(jax.nn.one_hot(groups_Tg, self.num_groups, dtype=jnp.bool_), axis=1)
        return jnp.repeat(is_top_TG, scores_TGe.shape[-1], axis=1)


@dataclass(frozen=True)
class NoisyTopK(Router):
    """Adds noise to the logits before the K largest are chosen, so that close experts share their tokens.

    The noise of each token and expert is normal, with a standard deviation that the router learns: the softplus of a
    second output of its matrix (arXiv 1701.06538, section 2.1). Gates are the softmax over the chosen noisy logits; the
    gate of a single choice is its probability among all experts, since it would otherwise be 1, without a gradient.
    Evaluations and generation use no noise.

    Attributes:
        std: standard deviation of the noise; None to learn it.
    """

    std: float | None = None
    draws_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.std is not None:
            check_number("NoisyTopK.std", self.std, least=0)

    def num_logits(self, num_classes: int) -> int:
        """Returns E, or 2 E if the router learns the noise's standard deviations."""
        return num_classes if self.std is not None else 2 * num_classes

    def route(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """See ``Router.route``."""
        logits_TE = tokens.logits_TX[:, :num_classes]
        if tokens.noise is not None:
            std = jax.nn.softplus(tokens.logits_TX[:, num_classes:]) if self.std is None else self.std
            logits_TE = logits_TE + std * tokens.noise.draw(jax.random.normal, num_classes, dtype=logits_TE.dtype)
        return TopK().choose(logits_TE, top_k)


class _Balanced(Router):
    """Base class of routers whose choices need no loss to be balanced."""

    def auxiliary_loss(
        self,
        routing: Routing,
        tokens: RouterTokens,
        popularity_E: Int[Array, " E"],
        num_tokens: jax.Array,
        top_k: int,
    ) -> Float[Array, ""]:
        """Returns zero: the choices are balanced already."""
        del tokens, popularity_E, num_tokens, top_k
        return jnp.zeros((), routing.probs_TE.dtype)


@dataclass(frozen=True)
class Sinkhorn(_Balanced):
    """Balances the choices of a rank's tokens by Sinkhorn's algorithm, without an auxiliary loss.

    Offsets of the experts are computed such that all experts have the same share of the tokens' probabilities; the K
    largest logits plus offsets are chosen. Gates are the probabilities without the offsets: each expert's sigmoid for a
    single choice, and otherwise the softmax (S-BASE, arXiv 2202.01169, and Megatron-LM). Generation chooses without
    offsets, since it has no other tokens to balance.

    Attributes:
        num_iterations: number of iterations of the algorithm.
    """

    num_iterations: int = 8

    def __post_init__(self) -> None:
        check_count("Sinkhorn.num_iterations", self.num_iterations, least=1, most=_MOST_ITERATIONS)

    def route(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """See ``Router.route``."""
        del num_classes
        logits_TE = tokens.logits_TX
        offset_E = self._offsets(lax.stop_gradient(logits_TE), tokens.valid_T)
        return self._routing(logits_TE, logits_TE + offset_E[None], top_k)

    def route_alone(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """See ``Router.route_alone``."""
        del num_classes
        return self._routing(tokens.logits_TX, tokens.logits_TX, top_k)

    def _offsets(self, logits_TE: jax.Array, valid_T: jax.Array) -> jax.Array:
        """Computes the experts' offsets, in the log domain; padding counts for nothing."""

        def balance(_: int, offset_E: jax.Array) -> jax.Array:
            shares_TE = jax.nn.log_softmax(logits_TE + offset_E[None], axis=-1)
            load_E = jax.nn.logsumexp(jnp.where(valid_T[:, None], shares_TE, -jnp.inf), axis=0)
            # An expert without any share keeps its offset; its logits may all be so small that they underflow.
            return offset_E - jnp.where(jnp.isfinite(load_E), load_E, 0)

        return lax.fori_loop(0, self.num_iterations, balance, jnp.zeros(logits_TE.shape[1], logits_TE.dtype))

    def _routing(self, logits_TE: jax.Array, ranked_TE: jax.Array, top_k: int) -> Routing:
        _, choices_TK = largest(lax.stop_gradient(ranked_TE), top_k)
        probs_TE = jax.nn.softmax(logits_TE, axis=-1)
        scores_TE = jax.nn.sigmoid(logits_TE) if top_k == 1 else probs_TE
        return Routing(choices_TK, jnp.take_along_axis(scores_TE, choices_TK, axis=-1), probs_TE)


@dataclass(frozen=True)
class ExpertChoice(_Balanced):
    """Lets every expert choose its tokens: the T * K / E tokens of a rank with its largest probabilities.

    All experts are chosen equally often; a token may have any number of experts, or none (arXiv 2202.09368). T is the
    number of a rank's tokens in a micro-batch, and T * K / E is rounded down. Later tokens of a sequence influence
    which experts an earlier one has, so a model cannot generate text by this rule.

    Attributes:
        most_experts: largest number of experts of a token; the ones with the smallest probabilities lose it. None for
            no limit, at the cost of E rows for every token in the gather before the exchange.
    """

    most_experts: int | None = None
    generates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.most_experts is not None:
            check_count("ExpertChoice.most_experts", self.most_experts, least=1)

    def most_choices(self, num_classes: int, top_k: int) -> int:
        """See ``Router.most_choices``."""
        del top_k
        return num_classes if self.most_experts is None else min(self.most_experts, num_classes)

    def most_pairs(self, num_tokens: int, num_classes: int, top_k: int) -> int:
        """Returns the choices of all experts together."""
        return self._tokens_per_expert(num_tokens, num_classes, top_k) * num_classes

    def route(self, tokens: RouterTokens, num_classes: int, top_k: int) -> Routing:
        """See ``Router.route``."""
        logits_TE = tokens.logits_TX
        probs_TE = jax.nn.softmax(logits_TE, axis=-1)
        wanted_TE = jnp.where(tokens.valid_T[:, None], lax.stop_gradient(logits_TE), -jnp.inf)
        # Tokens are compared by their probability for the expert, in the log domain, in which none underflows.
        wanted_TE = wanted_TE - jax.nn.logsumexp(lax.stop_gradient(logits_TE), axis=-1, keepdims=True)
        _, token_EC = largest(wanted_TE.T, self._tokens_per_expert(len(logits_TE), num_classes, top_k))
        is_chosen_ET = jnp.zeros(wanted_TE.T.shape, bool).at[jnp.arange(num_classes)[:, None], token_EC].set(True)
        is_chosen_TE = is_chosen_ET.T & tokens.valid_T[:, None]
        ranked_TE = jnp.where(is_chosen_TE, wanted_TE, -jnp.inf)
        best_TK, choices_TK = largest(ranked_TE, self.most_choices(num_classes, top_k))
        is_choice_TK = best_TK > -jnp.inf
        gates_TK = jnp.take_along_axis(probs_TE, choices_TK, axis=-1)
        return Routing(choices_TK, jnp.where(is_choice_TK, gates_TK, jnp.zeros_like(gates_TK)), probs_TE, is_choice_TK)

    def _tokens_per_expert(self, num_tokens: int, num_classes: int, top_k: int) -> int:
        number = num_tokens * top_k // num_classes
        if not number:
            allowed = f"has too few tokens: a rank has {num_tokens} in a micro-batch, for {num_classes} experts"
            raise SettingError("ExpertConfig.router", self, allowed)
        return number
