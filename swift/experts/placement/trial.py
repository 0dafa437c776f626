"""Trial of a user's placement policy before a run: JAX must be able to trace it, and its placements must be valid.

Errors found here are mistakes of the policy's author, so messages name the line in the author's file.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from swift.errors import SettingError, error_line
from swift.experts.placement.policy import PlacementPolicy
from swift.experts.placement.replicas import placement_error

_TRACED = (
    "needs a number where JAX has none yet, since it traces the policy before there is a load: "
    "use jax.numpy, jnp.where and jax.lax instead of numpy, float() and Python's if and for"
)


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


class _Trial:
    """Checks of one policy, and the errors that name the setting that selected it."""

    def __init__(self, policy: PlacementPolicy, setting: str):
        self._policy, self._setting = policy, setting

    def refuse(self, reason: str) -> NoReturn:
        raise SettingError(self._setting, self._policy, reason)

    def attempt(self, method: str, call: Callable[[], Any]) -> Any:
        """Returns the result of a call; turns an exception into a SettingError about the policy's method."""
        try:
            return call()
        except SettingError:
            raise
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise SettingError(self._setting, self._policy, f"{method}{self._line(error)} {_TRACED}") from error
        except Exception as error:
            reason = f"{method}{self._line(error)} raises {error_line(error)}"
            raise SettingError(self._setting, self._policy, reason) from error

    def _line(self, error: Exception) -> str:
        """Finds the last line of the policy's own file in an error's traceback."""
        try:
            policy_file = inspect.getfile(type(self._policy))
        except (TypeError, OSError):
            return ""
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == policy_file]
        return f" ({policy_file.rpartition('/')[2]}:{lines[-1].lineno})" if lines else ""

    def pair(self, method: str, result: Any, slots_LNS: tuple[int, int, int]) -> tuple[Any, Any]:
        """Checks that a method returned a placement and a state, both as abstract arrays; returns them."""
        if not isinstance(result, tuple) or len(result) != 2:
            self.refuse(f"{method} returns {_described(result)}: must return (placement, state)")
        placement, state = result
        is_array = isinstance(placement, jax.ShapeDtypeStruct)
        if not is_array or placement.shape != slots_LNS or placement.dtype != jnp.int32:
            allowed = f"int32{list(slots_LNS)}, the expert in every slot by layer and rank"
            self.refuse(f"{method} returns {_described(placement)} as the placement: must be {allowed}")
        return placement, state

    def same(self, method: str, before: Any, after: Any) -> None:
        """Raises SettingError if a state differs from the previous one in structure, shapes or dtypes."""
        kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (before, after)]
        trees: list[Any] = [jax.tree.structure(state) for state in (before, after)]
        if trees[0] != trees[1] or kinds[0] != kinds[1]:
            allowed = f"must stay as init makes it, {_described(before)}"
            self.refuse(f"{method} returns {_described(after)} as the state: {allowed}")

    def run(
        self, num_classes: int, slots_LNS: tuple[int, int, int], loads: dict[str, np.ndarray]
    ) -> dict[str, tuple[Any, Any]]:
        """Traces the policy anew, runs it on the loads in turn, and returns the placement and state after each."""
        num_layers, *slots_NS = slots_LNS
        policy = self._policy
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


def _described(tree: Any) -> str:
    if isinstance(tree, jax.ShapeDtypeStruct):
        return f"{tree.dtype}{list(tree.shape)}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_described, tree))})"
    return f"a {type(tree).__name__}" if tree is not None else "nothing"
