"""Trial of a user's router before a run: JAX must be able to trace it, and its choices must be valid.

Legend: T tokens, D model dim, E experts, K choices of a token, X outputs of the router's matrix.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.experts.routing import Number, Router, RouterTokens, Routing, TokenNoise
from swift.experts.trial import Trial, described

_TAKEN = ("norm", "score", "shared", "has_shared", "add_shared")
"""Names of the other parameters beside a router's state."""
_LENGTH = 4
"""Tokens of a sequence in the trial."""
_MOST_LOGITS = 2**20
_MOST_ELEMENTS = 256


def check_router(router: Router, num_classes: int, top_k: int, model_dim: int, setting: str) -> None:
    """Calls a router the way a step does, on random tokens, and checks its results.

    Args:
        router: router to try.
        num_classes: number of experts, E.
        top_k: ``ExpertConfig.top_k``.
        model_dim: width of the tokens, D.
        setting: name of the setting that selects the router, for error messages.

    Raises:
        SettingError: the router cannot be traced, does not return a ``Routing`` with the right shapes and dtypes,
            chooses an expert twice for a token or more often than it says, or decides differently when it is traced a
            second time. The message says where.
    """
    trial = _Trial(router, setting, num_classes, top_k, model_dim)
    trial.attempt("__hash__", lambda: hash(router))
    trial.check_sizes()
    state = trial.checked_state()
    few, many = (trial.checked_routing(state, count) for count in (num_classes, 2 * num_classes))
    if _described_numbers(few.numbers) != _described_numbers(many.numbers):
        trial.refuse("route returns numbers whose shapes depend on the number of tokens")
    if router.draws_noise:  # an evaluation has none
        quiet = trial.checked_routing(state, num_classes, draws=False)
        if _described_numbers(few.numbers) != _described_numbers(quiet.numbers):
            trial.refuse("route returns other numbers where tokens.noise is None")
    if router.generates:
        trial.checked_routing(state, num_classes, "route_alone", draws=False)
    trial.check_update(state)
    trial.check_loss(state)
    trial.check_choices(state)


@dataclass(frozen=True)
class _Trial(Trial):
    """Checks of one router; see ``check_router`` for the attributes."""

    num_classes: int
    top_k: int
    model_dim: int

    def check_sizes(self) -> None:
        """Checks the numbers of outputs and choices."""
        router = self.subject
        counts = {
            "num_logits": (self.attempt("num_logits", lambda: router.num_logits(self.num_classes)), _MOST_LOGITS),
            "most_choices": (
                self.attempt("most_choices", lambda: router.most_choices(self.num_classes, self.top_k)),
                self.num_classes,
            ),
        }
        for method, (count, most) in counts.items():
            if not isinstance(count, int) or not 1 <= count <= most:
                self.refuse(f"{method} returns {count!r}: must be a whole number from 1 to {most}")

    def checked_state(self) -> Mapping[str, np.ndarray]:
        """Returns the state before the first iteration."""
        state = self.attempt("init_state", lambda: self.subject.init_state(self.num_classes))
        if not isinstance(state, Mapping):
            self.refuse(f"init_state returns {described(state)}: must be a dict of arrays by name")
        for name, value in state.items():
            if not str(name).isidentifier() or name in _TAKEN:
                self.refuse(f"init_state has the name {name!r}: must be an identifier other than {', '.join(_TAKEN)}")
            if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating) or not value.size:
                self.refuse(f"init_state has {name!r} of type {type(value).__name__}: must be a float array of NumPy")
        return state

    def tokens(
        self, state: Mapping[str, Any], num_sequences: int, seed: int = 0, *, draws: bool = True
    ) -> RouterTokens:
        """Returns random tokens, of which the last is padding; with noise, if the router draws any."""
        random, num_tokens = np.random.default_rng(seed), num_sequences * _LENGTH
        num_logits = self.subject.num_logits(self.num_classes)
        keys = jnp.asarray(random.integers(0, 2**32, (num_sequences, 2), dtype=np.uint32))
        return RouterTokens(
            jnp.asarray(random.standard_normal((num_tokens, num_logits)), jnp.float32),
            jnp.asarray(random.standard_normal((num_tokens, self.model_dim)), jnp.float32),
            jnp.arange(num_tokens) < num_tokens - 1,
            {name: jnp.asarray(value) for name, value in state.items()},
            TokenNoise.of(keys, 0, _LENGTH) if draws and self.subject.draws_noise else None,
        )

    def checked_routing(
        self, state: Mapping[str, np.ndarray], num_sequences: int, method: str = "route", *, draws: bool = True
    ) -> Routing:
        """Traces a method that routes, and returns the checked result as abstract arrays."""
        num_classes, top_k, num_tokens = self.num_classes, self.top_k, num_sequences * _LENGTH

        def route() -> Any:
            return getattr(self.subject, method)(self.tokens(state, num_sequences, draws=draws), num_classes, top_k)

        result = self.attempt(method, lambda: jax.eval_shape(route))
        if not isinstance(result, Routing):
            self.refuse(f"{method} returns {described(result)}: must be a Routing")
        by_choice = num_tokens, self.subject.most_choices(num_classes, top_k)
        wanted = {
            "choices_TK": (by_choice, jnp.int32),
            "gates_TK": (by_choice, jnp.floating),
            "probs_TE": ((num_tokens, num_classes), jnp.floating),
            "is_choice_TK": (by_choice, jnp.bool_),
        }
        for name, (shape, kind) in wanted.items():
            leaf = getattr(result, name)
            if name == "is_choice_TK" and leaf is None:
                continue
            if (
                not isinstance(leaf, jax.ShapeDtypeStruct)
                or leaf.shape != shape
                or not jnp.issubdtype(leaf.dtype, kind)
            ):
                self.refuse(f"{method} returns {described(leaf)} as {name}: must be {kind.__name__}{list(shape)}")
            if kind is jnp.floating and jnp.finfo(leaf.dtype).bits < 32:
                self.refuse(f"{method} returns {name} of {leaf.dtype}: must be at least float32")
        self._check_numbers(result.numbers)
        return result

    def _check_numbers(self, numbers: Any) -> None:
        if numbers == ():
            return
        if not isinstance(numbers, Mapping) or not all(isinstance(number, Number) for number in numbers.values()):
            self.refuse("route returns numbers that are not a dict of Number by name")
        for name, number in numbers.items():
            if not isinstance(name, str) or not name.isidentifier():
                self.refuse(f"route returns a number with the name {name!r}: must be an identifier")
            if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(number)):
                self.refuse(f"route returns the number {name!r} as {described(tuple(number))}: must be floats")
            shape, size = number.total.shape, math.prod(number.total.shape)
            if number.weight is not None and number.weight.shape != shape[: len(number.weight.shape)]:
                self.refuse(f"route returns the number {name!r}: its weight must have the first dims of its total")
            if size > _MOST_ELEMENTS:
                allowed = f"at most {_MOST_ELEMENTS}, since each is recorded for each layer and iteration"
                self.refuse(f"route returns the number {name!r} with {size} elements: {allowed}")

    def check_update(self, state: Mapping[str, np.ndarray]) -> None:
        """Checks that ``update_state`` keeps names and shapes, and returns floats."""
        popularity_E = jax.ShapeDtypeStruct((self.num_classes,), jnp.int32)
        before = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in state.items()}
        update = lambda: jax.eval_shape(self.subject.update_state, before, popularity_E)  # noqa: E731
        after = self.attempt("update_state", update)
        shapes = {name: value.shape for name, value in state.items()}
        if not isinstance(after, Mapping) or {name: np.shape(leaf) for name, leaf in after.items()} != shapes:
            self.refuse("update_state returns other names or shapes than init_state")
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in after.values()):
            self.refuse("update_state returns arrays that are not of floats")

    def check_loss(self, state: Mapping[str, np.ndarray]) -> None:
        """Checks that ``auxiliary_loss`` returns a number."""

        def loss() -> Any:
            tokens = self.tokens(state, self.num_classes)
            routing = self.subject.route(tokens, self.num_classes, self.top_k)
            popularity_E = jnp.ones(self.num_classes, jnp.int32)
            return self.subject.auxiliary_loss(routing, tokens, popularity_E, jnp.int32(1), self.top_k)

        result = self.attempt("auxiliary_loss", lambda: jax.eval_shape(loss))
        if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.floating):
            self.refuse(f"auxiliary_loss returns {described(result)}: must be a float[]")

    def check_choices(self, state: Mapping[str, np.ndarray]) -> None:
        """Routes random tokens twice, and checks the choices."""
        num_classes, top_k = self.num_classes, self.top_k
        tokens = self.tokens(state, num_classes, seed=1)

        def run() -> Routing:
            return jax.device_get(jax.jit(lambda: self.subject.route(tokens, num_classes, top_k))())

        routing, again = (self.attempt("route", run) for _ in range(2))
        if not np.isfinite(routing.gates_TK).all() or not np.isfinite(routing.probs_TE).all():
            self.refuse("route returns gates or probs that are not finite")
        pairs = zip(jax.tree.leaves(routing), jax.tree.leaves(again), strict=True)
        if not all(np.array_equal(one, other, equal_nan=one.dtype != bool) for one, other in pairs):
            self.refuse("route chooses differently when it is traced again: all ranks must choose the same")
        is_choice_TK = np.ones(routing.choices_TK.shape, bool) if routing.is_choice_TK is None else routing.is_choice_TK
        is_choice_TK = is_choice_TK & np.asarray(tokens.valid_T)[:, None]
        for choices_K, is_choice_K in zip(routing.choices_TK, is_choice_TK, strict=True):
            chosen = choices_K[is_choice_K].tolist()
            if not all(0 <= choice < num_classes for choice in chosen):
                self.refuse(f"route chooses {chosen} for a token: must be from 0 to {num_classes - 1}")
            if len(set(chosen)) < len(chosen):
                self.refuse(f"route chooses {chosen} for a token: must differ from each other")
        most = self.attempt("most_pairs", lambda: self.subject.most_pairs(len(is_choice_TK), num_classes, top_k))
        if is_choice_TK.sum() > most:
            self.refuse(f"route makes {is_choice_TK.sum()} choices, and most_pairs says that there are at most {most}")


def _described_numbers(numbers: Any) -> list[str]:
    """Describes a router's own numbers, as abstract arrays."""
    return [] if numbers == () else [f"{name}: {described(tuple(number))}" for name, number in numbers.items()]
