"""A user's router is tried before a run: every mistake is one line that names the setting, the place and the rule."""

import itertools
import re
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from swift.cli.main import main
from swift.errors import SettingError
from swift.experts.router_trial import check_router
from swift.experts.routers import ExpertChoice, NoisyTopK, Sinkhorn, TopK
from swift.experts.routing import Number, Router, Routing
from tests.pipeline.cases import Threshold

COUNTER = itertools.count()


@dataclass(frozen=True)
class Own(Router):
    """A router of somebody's own that does nothing wrong."""

    def route(self, tokens, _, top_k):
        return TopK().choose(tokens.logits_TX, top_k)


def trial(router):
    check_router(router, 6, 2, 8, "ExpertConfig.router")


@pytest.mark.parametrize(
    "router",
    [
        Own(),
        TopK(bias_update_rate=0.1),
        TopK(num_groups=3, top_groups=2),
        NoisyTopK(),
        Sinkhorn(),
        ExpertChoice(),
        Threshold(),
    ],
    ids=repr,
)
def test_sound_routers_pass(router):
    trial(router)


def changed(**fields):
    """A route that returns the right routing but for some fields."""

    def route(_, tokens, __, top_k):
        routing = TopK().choose(tokens.logits_TX, top_k)
        return routing._replace(**{name: change(routing, tokens) for name, change in fields.items()})

    return {"route": route}


def branching(_, tokens, __, top_k):
    return TopK().choose(tokens.logits_TX if tokens.logits_TX[0, 0] > 0 else -tokens.logits_TX, top_k)


WRONG = {
    "no routing": ({"route": lambda *_: (1, 2)}, r"route returns \(int32\[\], int32\[\]\): must be a Routing"),
    "an error": ({"route": lambda *_: [][0]}, r"route \(test_router_trial\.py:\d+\) raises IndexError"),
    "a branch": ({"route": branching}, r"route \(test_router_trial\.py:\d+\) needs a number where JAX has none yet"),
    "choices of another type": (
        changed(choices_TK=lambda routing, _: routing.choices_TK.astype(jnp.uint8)),
        r"route returns uint8\[24, 2\] as choices_TK: must be int32\[24, 2\]",
    ),
    "gates of another shape": (
        changed(gates_TK=lambda routing, _: routing.gates_TK[:, :1]),
        r"route returns float32\[24, 1\] as gates_TK: must be floating\[24, 2\]",
    ),
    "choices that are numbers": (
        changed(is_choice_TK=lambda routing, _: routing.gates_TK),
        r"float32\[24, 2\] as is_choice_TK: must be bool",
    ),
    "one expert twice": (
        changed(choices_TK=lambda routing, _: routing.choices_TK * 0),
        r"route chooses \[0, 0\] for a token: must differ",
    ),
    "experts counted from 1": (
        changed(choices_TK=lambda routing, _: routing.choices_TK + 1),
        r"for a token: must be from 0 to 5",
    ),
    "gates without an end": (
        changed(gates_TK=lambda routing, _: routing.gates_TK / 0),
        "route returns gates or probs that are not finite",
    ),
    "gates that are no numbers": (
        changed(gates_TK=lambda routing, _: routing.gates_TK * jnp.nan),
        "route returns gates or probs that are not finite",
    ),
    "gates that are narrow": (
        changed(gates_TK=lambda routing, _: routing.gates_TK.astype(jnp.bfloat16)),
        "route returns gates_TK of bfloat16: must be at least float32",
    ),
    "noise that is not always there": (
        {"draws_noise": True, **changed(probs_TE=lambda of, tokens: of.probs_TE + tokens.noise.sequence_length)},
        r"route \(test_router_trial\.py:\d+\) raises AttributeError: 'NoneType'",
    ),
    "numbers with noise alone": (
        {
            "draws_noise": True,
            **changed(numbers=lambda _, tokens: {"a": Number(jnp.zeros(2 if tokens.noise is None else 1))}),
        },
        "route returns other numbers where tokens.noise is None",
    ),
    "no rule for generation": ({"route_alone": lambda *_: 1}, r"route_alone returns int32\[\]: must be a Routing"),
    "a number with a path for a name": (
        changed(numbers=lambda *_: {"../x": Number(jnp.zeros(()))}),
        r"a number with the name '\.\./x': must be an identifier",
    ),
    "a weight of another shape": (
        changed(numbers=lambda *_: {"mine": Number(jnp.zeros(()), jnp.zeros(6))}),
        "its weight must have the first dims of its total",
    ),
    "too long a vector": (
        changed(numbers=lambda *_: {"mine": Number(jnp.zeros(10_000))}),
        "the number 'mine' with 10000 elements: at most 256",
    ),
    "numbers that are arrays": (
        changed(numbers=lambda routing, _: {"mine": routing.gates_TK.sum()}),
        "numbers that are not a dict of Number by name",
    ),
    "counts": (
        changed(numbers=lambda routing, _: {"mine": Number(routing.choices_TK.sum())}),
        r"route returns the number 'mine' as \(int32\[\], nothing\): must be floats",
    ),
    "numbers by token": (
        changed(numbers=lambda routing, _: {"mine": Number(routing.gates_TK[:, 0])}),
        "numbers whose shapes depend on the number of tokens",
    ),
    "another choice each time": (
        changed(gates_TK=lambda routing, _: routing.gates_TK + next(COUNTER)),
        "route chooses differently when it is traced again",
    ),
    "more choices than it says": (
        {"most_pairs": lambda *_: 5},
        r"route makes 46 choices, and most_pairs says that there are at most 5",
    ),
    "more choices than experts": (
        {"most_choices": lambda *_: 7},
        "most_choices returns 7: must be a whole number from 1",
    ),
    "no outputs": ({"num_logits": lambda *_: 0}, "num_logits returns 0: must be a whole number from 1"),
    "a state of JAX": (
        {"init_state": lambda *_: {"level": jnp.zeros(3)}},
        "init_state has 'level' of type ArrayImpl: must be a float array of NumPy",
    ),
    "a state with a name that is taken": (
        {"init_state": lambda *_: {"score": np.zeros(3)}},
        "init_state has the name 'score': must be an identifier other than norm, score, shared",
    ),
    "a state that loses a name": (
        {"init_state": lambda *_: {"level": np.zeros(3, np.float32)}, "update_state": lambda *_: {}},
        "update_state returns other names or shapes than init_state",
    ),
    "a state that becomes a count": (
        {
            "init_state": lambda *_: {"level": np.zeros(6, np.float32)},
            "update_state": lambda _, __, popularity_E: {"level": popularity_E},
        },
        "update_state returns arrays that are not of floats",
    ),
    "a loss for each token": (
        {"auxiliary_loss": lambda _, routing, *__: routing.gates_TK[:, 0]},
        r"auxiliary_loss returns float32\[24\]: must be a float",
    ),
}


@pytest.mark.parametrize(("methods", "reason"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told_in_a_line(methods, reason):
    own = type("Own", (Own,), methods | {"__repr__": lambda _: "Own()", "__hash__": object.__hash__})
    with pytest.raises(SettingError) as caught:
        trial(own())
    text = str(caught.value)
    assert text.startswith("ExpertConfig.router = Own(): ")
    assert "\n" not in text
    assert re.search(reason, text), text


def test_a_routing_without_a_choice_is_sound():
    class Idle(Own):
        def route(self, tokens, _, top_k):
            routing = TopK().choose(tokens.logits_TX, top_k)
            none = jnp.zeros(routing.choices_TK.shape, bool)
            return Routing(routing.choices_TK, routing.gates_TK * 0, routing.probs_TE, none)

    trial(Idle())


WRONG_ROUTER = """
from dataclasses import dataclass
from swift.experts import Router


@dataclass(frozen=True)
class Wrong(Router):
    def route(self, tokens, num_classes, top_k):
        return tokens.logits_TX.no_such_thing
"""


def test_a_wrong_router_costs_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_router.py").write_text(WRONG_ROUTER)
    (tmp_path / "wrong.gin").write_text(
        "import wrong_router\nExperiment.experts = @ExpertConfig()\nExpertConfig.router = @Wrong()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "wrong.gin", "--run-dir", "run"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("swift: ExpertConfig.router = Wrong(): route (wrong_router.py:9) raises AttributeError")
    assert "\n" not in error
    assert not (tmp_path / "run").exists()
