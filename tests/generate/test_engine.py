"""Answers of the engine, against the whole model run anew for each token."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.request import GREEDY, Request, Sampling
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits
from tests.generate.tree_pages import tree_pages

pytestmark = pytest.mark.usefixtures("x64")

COMMON = {"num_layers": 2, "model_dim": 8, "num_heads": 2, "ffn_dim": 12, "sequence_length": 12}
MODELS = {
    "learned positions": ModelConfig(**COMMON, moe_pattern=(False, True)),
    "rotated positions, shared keys": ModelConfig(
        **COMMON, moe_pattern=(True,), norm="rmsnorm", positions="rope", activation="swiglu", num_kv_heads=1
    ),
}
EXPERTS = ExpertConfig(num_classes=4, top_k=2)
VOCAB = 17
TEXTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [3, 1, 4], [3, 1, 4, 1, 5], [3, 1, 4, 2, 2]]
"""A beginning of others, one of a single token, one that fills the model's positions, and the same twice."""
COUNT = 15
LITTLE = TextEngineConfig(batch=3, cache_tokens=24, prefill_passages=2, prefill_length=4)
SIZES = {
    "roomy": TextEngineConfig(),
    "little memory": LITTLE,
    "nothing shared": replace(LITTLE, share_prefixes=False),
    "two expert ranks": replace(LITTLE, expert_ranks=2),
    "an expert a rank": replace(LITTLE, expert_ranks=4),
}


class Plain:
    """A model whose logits are computed anew from all tokens, and continuations by them."""

    def __init__(self, config):
        self.gpt = GPT(config, VOCAB, EXPERTS.num_classes)
        random = np.random.default_rng(0)
        shapes = jax.eval_shape(lambda: self.gpt.init(jax.random.key(0)))
        packed = {name: jnp.asarray(random.standard_normal(of.shape)) for name, of in shapes.items()}
        self.weights = self.gpt.unpack(packed)
        self._run = jax.jit(lambda tokens: plain_logits(self.gpt, EXPERTS, self.weights, tokens)[0])

    def logits(self, tokens):
        """Logits after each of a text's tokens."""
        window = np.zeros((1, self.gpt.config.sequence_length), np.int32)
        window[0, : len(tokens)] = tokens
        return np.asarray(self._run(window))[: len(tokens)]

    def continued(self, tokens, count, choose):
        """New tokens, each chosen by ``choose(logits, number)``."""
        text = list(tokens)
        for number in range(count):
            text.append(choose(self.logits(text[-self.gpt.config.sequence_length :])[-1], number))
        return text[len(tokens) :]


@pytest.fixture(scope="module", params=MODELS)
def plain(request):
    return Plain(MODELS[request.param])


@pytest.fixture(scope="module")
def likeliest(plain):
    return [plain.continued(text, COUNT, lambda logits, _: int(logits.argmax())) for text in TEXTS]


def engine_of(plain, config=LITTLE):
    return TextEngine(plain.gpt, EXPERTS, plain.weights, config)


def is_clean(engine):
    """Whether every page is free or of the tree, and nothing is locked."""
    sequences = engine.pool
    return (
        sorted(sequences.free + tree_pages(sequences.tree.root)) == list(range(engine.num_pages))
        and sequences.tree.num_locked == 0
    )


@pytest.mark.parametrize(
    "sizes",
    [
        *("roomy", "little memory", "nothing shared"),
        pytest.param("two expert ranks", marks=pytest.mark.long),
        pytest.param("an expert a rank", marks=pytest.mark.slow),
    ],
)
def test_every_token_is_the_likeliest_of_the_whole_model(plain, likeliest, sizes):
    """Beyond the window of positions, too, and whatever the other texts, the memory and the batch are."""
    engine = engine_of(plain, SIZES[sizes])
    answers = engine.answers([Request(text, COUNT, GREEDY) for text in TEXTS])
    assert len({tuple(answer.tokens) for answer in answers}) == len(TEXTS) - 1
    assert [answer.tokens for answer in answers] == likeliest
    assert {answer.reason for answer in answers} == {"length"}
    assert is_clean(engine)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_well")
def test_tokens_of_programs_as_a_user_compiles_them(plain, likeliest):
    answers = engine_of(plain).answers([Request(text, COUNT, GREEDY) for text in TEXTS])
    assert [answer.tokens for answer in answers] == likeliest


def oracle_choice(sampling):
    """The choice by its definition: the token at which the sum of the probabilities exceeds a uniform number."""

    def choose(logits, number):
        order = np.argsort(-logits, kind="stable")[: sampling.top_k]
        probs = np.exp((logits[order] - logits.max()) / sampling.temperature)
        probs /= probs.sum()
        kept = np.concatenate([[0.0], np.cumsum(probs)[:-1]]) < sampling.top_p
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), sampling.stream), number)
        uniform = float(jax.random.uniform(key, (), jnp.float32))
        sums = np.cumsum(np.where(kept, probs, 0))
        return int(order[np.searchsorted(sums, uniform * sums[-1], side="right")])

    return choose


def test_choices_depend_on_the_request_alone(plain):
    """In whatever order and company, and after others have been there."""
    requests = [
        Request(
            TEXTS[number % len(TEXTS)], 5, Sampling(1.5, top_k=1 + 3 * number, top_p=0.9, seed=number // 2, stream=7)
        )
        for number in range(6)
    ]
    expected = [plain.continued(r.tokens, 5, oracle_choice(r.sampling)) for r in requests]
    assert len(set(map(tuple, expected))) > 3
    engine = engine_of(plain)
    assert [answer.tokens for answer in engine.answers(requests)] == expected
    assert [answer.tokens for answer in engine.answers(requests[::-1])] == expected[::-1]


def test_scores_are_those_of_the_whole_model(plain):
    engine = engine_of(plain)
    requests = [Request(TEXTS[2], scored_from=start) for start in (1, 5, 11, 12)]
    log_probs = np.array(jax.nn.log_softmax(plain.logits(TEXTS[2])))
    following = np.array(TEXTS[2][1:])
    for request, answer in zip(requests, engine.answers(requests), strict=True):
        rows = slice(request.scored_from - 1, len(following))
        expected = log_probs[:-1][rows][np.arange(len(following[rows])), following[rows]]
        np.testing.assert_allclose(answer.text_log_probs, expected, rtol=1e-10)
        np.testing.assert_array_equal(answer.is_likeliest, log_probs[:-1][rows].argmax(axis=1) == following[rows])
        assert (answer.tokens, answer.reason) == ([], "length")


def test_experts_are_spread_over_ranks(plain):
    """Each has its share of them; the rest of the model and the pages are on all, and a device less is one too few."""
    engine = engine_of(plain, replace(LITTLE, expert_ranks=2))
    devices = set(jax.devices()[:2])
    for name, layers in engine.weights.items():
        for leaf in jax.tree.leaves(layers):
            assert leaf.sharding.device_set == devices
            held = [shard.data.shape[0] for shard in leaf.addressable_shards]
            assert held == [2, 2] if name == "expert" else leaf.sharding.is_fully_replicated
    engine.answers([Request(TEXTS[0], 3, GREEDY)])


@pytest.mark.parametrize(
    ("ranks", "classes", "line"),
    [
        (3, 4, "TextEngineConfig.expert_ranks = 3: must divide 4, the number of experts"),
        (16, 16, "TextEngineConfig.expert_ranks = 16: must be at most 12, the number of devices"),
        (0, 4, "TextEngineConfig.expert_ranks = 0: must be a whole number of at least 1"),
    ],
)
def test_expert_ranks_that_cannot_be(ranks, classes, line):
    gpt = GPT(MODELS["learned positions"], VOCAB, classes)
    with pytest.raises(SettingError, match=re.escape(line)):
        TextEngine(gpt, replace(EXPERTS, num_classes=classes), {}, replace(LITTLE, expert_ranks=ranks))


def test_log_probabilities_of_new_tokens(plain):
    (answer,) = engine_of(plain).answers([Request(TEXTS[0], 4, Sampling(2.0, seed=3))])
    text = [*TEXTS[0], *answer.tokens]
    log_probs = jax.nn.log_softmax(plain.logits(text))
    expected = [log_probs[at - 1, text[at]] for at in range(len(TEXTS[0]), len(text))]
    np.testing.assert_allclose(answer.log_probs, expected, rtol=1e-10)


def test_nothing_is_computed_twice(plain):
    """Neither of beginnings that texts share, even in one call, nor of a text that continues an earlier answer."""
    engine, texts = engine_of(plain, TextEngineConfig()), [text for text in TEXTS if len(text) < 12]
    answers = engine.answers([Request(text, 2, GREEDY) for text in texts])
    distinct = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
    assert engine.computed.prompt_tokens == len(distinct)  # a text that begins others is read before them
    before = engine.computed.prompt_tokens
    longer = [*TEXTS[0], *answers[0].tokens, 7]
    engine.answers([Request(longer, 1, GREEDY)])
    assert engine.computed.prompt_tokens - before == 2  # the last of the answer had no successor yet


def test_an_answer_ends_at_a_stop_token(plain, likeliest):
    stop = likeliest[0][3]
    (answer,) = engine_of(plain).answers([Request(TEXTS[0], COUNT, GREEDY, frozenset({stop}))])
    assert answer.tokens == likeliest[0][: likeliest[0].index(stop) + 1]
    assert answer.reason == "stop"


class Even:
    """Even tokens only, three of them."""

    def __init__(self):
        self.seen = []

    def allowed(self):
        return (np.arange(VOCAB) % 2 == 0) & (len(self.seen) < 3)

    def accept(self, token):
        self.seen.append(token)


def test_a_constraint_leaves_the_others_alone(plain, likeliest):
    engine, constraint = engine_of(plain), Even()
    requests = [Request(TEXTS[0], COUNT, GREEDY, constraint=constraint), Request(TEXTS[0], COUNT, GREEDY)]
    bound, free = engine.answers(requests)
    expected = plain.continued(TEXTS[0], 3, lambda logits, _: 2 * int(logits[::2].argmax()))
    assert (bound.tokens, bound.reason, constraint.seen) == (expected, "end", expected)
    assert free.tokens == likeliest[0]


def test_a_cancelled_request_gives_its_room_back(plain, likeliest):
    engine = engine_of(plain)
    answers = [engine.submit(Request(text, 6, GREEDY)) for text in TEXTS]
    for _ in range(4):
        engine.step()
    for answer in (answers[0], answers[2], answers[5]):
        engine.cancel(answer)
    while not engine.is_idle:
        engine.step()
    assert is_clean(engine)
    for number in (1, 3, 4):
        assert answers[number].tokens == likeliest[number][:6]
    assert answers[0].reason == answers[5].reason == "cancelled"


@pytest.mark.parametrize("error", [SettingError("--tokens", 0, "must be more"), KeyboardInterrupt()], ids=type)
def test_requests_that_are_not_all_submitted_leave_nothing(plain, error):
    """Whatever ends that; a request of before stays."""
    engine = engine_of(plain)
    kept, seen = engine.submit(Request([1], 2, GREEDY)), []

    def requests():
        yield from (Request(text, 2, GREEDY) for text in TEXTS[:2])
        seen.append(engine.num_unanswered)
        raise error

    for take in (engine.submit_all, engine.answers):
        with pytest.raises(type(error)):
            take(requests())
        assert engine.num_unanswered == 1
    assert (seen, kept.reason) == ([3, 3], None)


def test_an_interrupted_call_cancels_all_that_were_to_be_answered(plain, monkeypatch):
    engine = engine_of(plain)

    def interrupted():
        assert engine.num_unanswered == len(TEXTS)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.answers(Request(text, 2, GREEDY) for text in TEXTS)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request([]), "len(Request.tokens) = 0: must be from 1 to 12"),
        (Request([1] * 13), "len(Request.tokens) = 13: must be from 1 to 12, the positions of the model"),
        (Request([1, 17]), "Request.tokens = 17: must be tokens from 0 to 16"),
        (Request([1], -1), "Request.max_tokens = -1: must be a whole number of at least 0"),
        (Request([1], scored_from=2), "Request.scored_from = 2: must be from 1 to 1"),
    ],
    ids=["empty", "long", "vocabulary", "negative", "scores"],
)
def test_a_request_that_cannot_be_answered(plain, request_, line):
    """Is refused in a line, and the others are answered."""
    engine = engine_of(plain)
    kept = engine.submit(Request([1], 2, GREEDY))
    with pytest.raises(SettingError, match=re.escape(line)):
        engine.submit(request_)
    engine.answers([])
    assert kept.reason == "length"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request([1, 2], 7), "Request.max_tokens = 7: must be at most 6: the engine keeps 8 tokens"),
        (Request([1] * 9), "len(Request.tokens) = 9: must be from 1 to 8, the tokens that the engine keeps"),
    ],
)
def test_a_request_beyond_the_memory(plain, request_, line):
    """Is refused in a line, with the setting; one that fits is taken."""
    engine = engine_of(plain, TextEngineConfig(cache_tokens=8))
    with pytest.raises(SettingError, match=re.escape(f"{line} (TextEngineConfig.cache_tokens)")):
        engine.submit(request_)
    engine.submit(Request([1, 2], 6))
    assert engine.num_unanswered == 1
