"""Trial of a user's placement policy before a run: JAX must be able to trace it, and its placements must be valid.

Errors found here are mistakes of the policy's author, so messages name the line in the author's file.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.experts.placement.policy import PlacementPolicy
from swift.experts.placement.replicas import placement_error
from swift.experts.trial import Trial, described


def check_policy(
    policy: PlacementPolicy,
    num_layers: int,
    num_classes: int,
    num_ranks: int,
    slots_per_rank: int,
    num_tokens: int,
    setting: str,
) -> None:
    """Calls a policy the way a step does, on loads that tend to break policies, and checks its results.

    Args:
        policy: policy to try.
        num_layers: number of expert layers of a stage, L.
        num_classes: number of experts, E.
        num_ranks: number of expert ranks, N.
        slots_per_rank: slots per rank, S.
        num_tokens: number of (token, choice) pairs of a layer in an iteration.
        setting: name of the setting that selects the policy, for error messages.

    Raises:
        SettingError: the policy cannot be traced, does not return a valid placement and a state with the structure,
            shapes and dtypes of the previous one, or decides differently when traced a second time. The message says
            where.
    """
    trial = _Trial(policy, setting)
    slots_LNS = (num_layers, num_ranks, slots_per_rank)
    trial.attempt("__hash__", lambda: hash(policy))
    trial.attempt("name", lambda: getattr(policy, "name", None))
    first = trial.attempt("init", lambda: jax.eval_shape(lambda: policy.init(num_layers, num_classes, *slots_LNS[1:])))
    placement, state = trial.pair("init", first, slots_LNS)
    load = jax.ShapeDtypeStruct((num_layers, num_classes), jnp.int32)
    later = trial.attempt("__call__", lambda: jax.eval_shape(lambda *now: policy(*now), load, placement, state))
    _, after = trial.pair("__call__", later, slots_LNS)
    trial.same("__call__", state, after)

    loads = dict(_loads(num_layers, num_classes, num_tokens))
    chosen, again = (trial.attempt("__call__", lambda: trial.run(num_classes, slots_LNS, loads)) for _ in range(2))
    for name, (before, other) in zip(chosen, zip(chosen.values(), again.values(), strict=True), strict=True):
        if not all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(other))):
            trial.refuse(f"chooses differently for {name} when it is traced again: all ranks must choose the same")


class _Trial(Trial):
    """Checks of one policy."""

    def pair(self, method: str, result: Any, slots_LNS: tuple[int, int, int]) -> tuple[Any, Any]:
        """Checks that a method returned a placement and a state, both as abstract arrays; returns them."""
        if not isinstance(result, tuple) or len(result) != 2:
            self.refuse(f"{method} returns {described(result)}: must return (placement, state)")
        placement, state = result
        is_array = isinstance(placement, jax.ShapeDtypeStruct)
        if not is_array or placement.shape != slots_LNS or placement.dtype != jnp.int32:
            allowed = f"int32{list(slots_LNS)}, the expert in every slot by layer and rank"
            self.refuse(f"{method} returns {described(placement)} as the placement: must be {allowed}")
        return placement, state

    def same(self, method: str, before: Any, after: Any) -> None:
        """Raises SettingError if a state differs from the previous one in structure, shapes or dtypes."""
        kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (before, after)]
        trees: list[Any] = [jax.tree.structure(state) for state in (before, after)]
        if trees[0] != trees[1] or kinds[0] != kinds[1]:
            allowed = f"must stay as init makes it, {described(before)}"
            self.refuse(f"{method} returns {described(after)} as the state: {allowed}")

    def run(
        self, num_classes: int, slots_LNS: tuple[int, int, int], loads: dict[str, np.ndarray]
    ) -> dict[str, tuple[Any, Any]]:
        """Traces the policy anew, runs it on the loads in turn, and returns the placement and state after each."""
        num_layers, *slots_NS = slots_LNS
        policy = self.subject
        now = jax.jit(lambda: policy.init(num_layers, num_classes, *slots_NS))()
        self._check("init returns", now[0], num_classes)
        call, chosen = jax.jit(lambda *args: policy(*args)), {}
        for name, popularity_LE in loads.items():
            now = call(popularity_LE, *now)
            self._check(f"__call__ returns for {name}", now[0], num_classes)
            chosen[name] = jax.device_get(now)
        return chosen

    def _check(self, when: str, placement: jax.Array, num_classes: int) -> None:
        placement_LNS = np.asarray(placement)
        reason = placement_error(placement_LNS, num_classes)
        if reason is not None:
            text = str(placement_LNS.reshape(len(placement_LNS), -1).tolist())
            self.refuse(f"{when} {text if len(text) < 80 else text[:77] + '...'}: {reason}")


def _loads(num_layers: int, num_classes: int, num_tokens: int) -> Iterator[tuple[str, np.ndarray]]:
    random, layers = np.random.default_rng(0), np.arange(num_layers)
    one_LE = np.zeros((num_layers, num_classes), np.int32)
    yield "no tokens", one_LE.copy()
    yield "as many tokens for every expert", one_LE + np.int32(num_tokens // num_classes)
    one_LE[layers, (num_classes - 1 - layers) % num_classes] = num_tokens
    yield "all tokens for one expert", one_LE
    shares = random.dirichlet(np.full(num_classes, 0.3), size=num_layers)
    yield "uneven tokens", np.stack([random.multinomial(num_tokens, share) for share in shares]).astype(np.int32)
    halves_E = num_tokens >> np.minimum(np.arange(1, num_classes + 1), 31)
    yield "half as many for each next expert", np.tile(halves_E.astype(np.int32), (num_layers, 1))
