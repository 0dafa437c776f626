"""A policy is tried before a run: every mistake is one line that names the setting, the place and what is allowed."""

import itertools
import random
import re
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static, uniform_placement
from swift.experts.placement.replicas import placement_error, replica_error
from swift.experts.placement.symi import Symi
from swift.experts.placement.trial import check_policy

SHAPE = (2, 5, 3, 4)  # L, E, N, S
COUNTER = itertools.count()
KEPT = []


@dataclass(frozen=True)
class Own:
    """A policy of somebody's own that does nothing wrong."""

    name = "own"

    def init(self, *shape):
        return uniform_placement(*shape), jnp.zeros((), jnp.int32)

    def __call__(self, _, placement_LNS, state):
        return placement_LNS, state


def trial(policy):
    check_policy(policy, *SHAPE, num_tokens=960, setting="Experiment.placement")


@pytest.mark.parametrize("policy", [Own(), Static(), Symi(), MinMax(), Packed(), FlexMoE(2)], ids=repr)
def test_sound_policies_pass(policy):
    trial(policy)


def refusal(call=None, init=None):
    """The error of a policy with another method or two."""
    methods = {"__call__": call, "init": init, "__repr__": lambda _: "Own()"}
    own = type("Own", (Own,), {name: method for name, method in methods.items() if method is not None})
    with pytest.raises(SettingError) as caught:
        trial(own())
    text = str(caught.value)
    assert text.startswith("Experiment.placement = Own(): ")
    assert "\n" not in text
    return text.partition(": ")[2]


def numpy_call(_, load, now, state):
    return np.sort(load)[:, :3].reshape(now.shape), state


def branching_call(_, load, now, state):
    return (now + 1 if load[0, 0] > 3 else now), state


def indexing_call(_, load, now, state):
    return now + load[load > 3].sum(), state


def keeping_call(_, load, now, state):
    KEPT.append(load)
    return now + KEPT[0].sum() * 0, state


NOT_YET = r"__call__( \(test_trial\.py:\d+\))? needs a number where JAX has none yet"


@pytest.mark.parametrize("call", [numpy_call, branching_call, indexing_call, keeping_call])
def test_what_jax_cannot_trace_is_told_in_a_sentence(call):
    assert re.match(NOT_YET, refusal(call))


def test_the_line_of_the_users_own_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "hasty.py").write_text(
        "import numpy as np\n\n\nclass Hasty:\n    def init(self, *shape):\n        return np.zeros(shape[4]), ()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import hasty

    with pytest.raises(SettingError, match=r"init \(hasty\.py:6\) raises IndexError: tuple index out of range"):
        trial(hasty.Hasty())


WRONG_RESULTS = {
    "no pair": (lambda *now: now[2], None, r"__call__ returns int32\[2, 3, 4\]: must return \(placement, state\)"),
    "shape": (
        lambda *now: (now[2][0], now[3]),
        None,
        r"__call__ returns int32\[3, 4\] as the placement: must be int32\[2, 3, 4\], the expert in every slot by layer",
    ),
    "type": (lambda *now: (now[2] * 1.0, now[3]), None, r"float32\[2, 3, 4\] as the placement: must be int32\[2, 3"),
    "list": (lambda *now: ([now[2]], now[3]), None, r"\(int32\[2, 3, 4\]\) as the placement"),
    "state's structure": (
        lambda *now: (now[2], (now[3],)),
        None,
        r"__call__ returns \(int32\[\]\) as the state: must stay as init makes it, int32\[\]",
    ),
    "state's type": (lambda *now: (now[2], now[3] / 2), None, r"returns float32\[\] as the state"),
    "state's shape": (lambda *now: (now[2], now[1]), None, r"returns int32\[2, 5\] as the state"),
    "init, nothing": (None, lambda *_: None, r"init returns nothing: must return \(placement, state\)"),
    "init, type": (None, lambda *_: (jnp.zeros((2, 3, 4)), ()), r"init returns float32\[2, 3, 4\] as the placement"),
    "init, a string": (None, lambda _, *shape: (uniform_placement(*shape), "x"), "init raises TypeError"),
    "error": (
        lambda *_: [][0],
        None,
        r"__call__ \(test_trial\.py:\d+\) raises IndexError: list index out of",
    ),
}


@pytest.mark.parametrize(("call", "init", "reason"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_wrong_results_are_described(call, init, reason):
    assert re.search(reason, refusal(call, init))


UNSOUND = {
    "a slot with -1": (lambda *now: (now[2].at[1, 0, 0].set(-1), now[3]), r"1 slots of layer 1 hold none of the exp"),
    "counted from 1": (lambda *now: (now[2] + 1, now[3]), r"expert 0 of 0 to 4 has no slot in layer 0"),
    "a starved class": (
        lambda *now: (jnp.where(now[1].sum() == 0, now[2], jnp.minimum(now[2], 3)), now[3]),
        r"__call__ returns for as many tokens for every expert \[\[0, 0, .*: expert 4 of 0 to 4 has no slot in layer 0",
    ),
}


@pytest.mark.parametrize(("call", "reason"), UNSOUND.values(), ids=UNSOUND)
def test_placements_that_serve_no_tokens_are_refused(call, reason):
    assert re.search(reason, refusal(call))


def test_a_first_placement_is_held_to_the_same():
    first = lambda _, *shape: (uniform_placement(*shape) - 1, ())  # noqa: E731
    assert re.search(r"init returns .*: expert 4 of 0 to 4 has no slot", refusal(lambda *now: (now[2], now[3]), first))


@pytest.mark.parametrize(
    "number", [lambda: random.randrange(10**9), lambda: next(COUNTER)], ids=["random", "a counter outside"]
)
def test_a_policy_that_chooses_otherwise_each_time_is_refused(number):
    call = lambda _, load, now, state: (now, state + number())  # noqa: ARG005, E731
    assert refusal(call).startswith("chooses differently for no tokens when it is traced again")


def test_a_policy_that_cannot_be_hashed_is_refused():
    class Open(Own):
        __hash__ = None

    with pytest.raises(SettingError, match="__hash__ raises TypeError: unhashable type"):
        trial(Open())


def test_soundness_by_replicas_and_by_placement():
    sound = np.asarray(uniform_placement(*SHAPE))
    assert placement_error(sound, 5) is None
    assert placement_error(sound[:0], 5) is None
    assert replica_error(np.zeros((0, 5), int), 12) is None
    assert replica_error(np.array([[1, 1], [2, 0]]), 2) == "expert 1 of 0 to 1 has no slot in layer 1"
    astray = np.where(sound == 2, 9, sound)
    assert placement_error(astray, 5) == "expert 2 of 0 to 4 has no slot in layer 0"
