"""The engine's bookkeeping, with a model whose pages hold the texts that they stand for.

A page that is wrong, stale, written twice or read before it is written fails at once; an answer is compared with that
of the request alone. Nothing is compiled.
"""

import random
from contextlib import suppress
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.routers import TopK
from swift.generate import engine
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.request import Request, Sampling
from tests.generate.tree_pages import tree_pages

VOCAB = 3


def mixed(*values):
    return crc32(repr(values).encode())


def fake_extend(_gpt, _experts, _weights, pages, arrays, _ranks):
    """Writes to each page the text up to its token, and holds what is read against what was written."""
    pages, written, seen = list(pages), set(), []
    log_prob_RC = np.zeros(arrays.token_RC.shape)
    likeliest_RC = np.zeros(arrays.token_RC.shape, bool)
    for row, (count, first) in enumerate(zip(arrays.count_R, arrays.first_R, strict=True)):
        table = arrays.table_RN[row]
        text = pages[table[first - 1]] if count and first else ()
        assert not count or len(text) == first
        for column in range(count):
            text = (*text, int(arrays.token_RC[row, column]))
            page = int(arrays.page_RC[row, column])
            if page < len(pages):
                assert page == table[first + column]
                assert page not in written
                written.add(page)
                pages[page] = text
            label = int(arrays.label_RC[row, column])
            if label >= 0:
                log_prob_RC[row, column] = -(mixed("score", text, label) % 1000)
                likeliest_RC[row, column] = mixed("score", text, label) % 2
        seen.append((table, text))
    for table, text in seen:
        assert [pages[page] for page in table[: len(text)]] == [text[: end + 1] for end in range(len(text))]
    return SimpleNamespace(
        logits_RV=[text for _, text in seen], log_prob_RC=log_prob_RC, likeliest_RC=likeliest_RC
    ), pages


def token_after(text, sampling, number, allowed):
    candidates = [token for token in range(VOCAB) if allowed is None or allowed[token]]
    return candidates[mixed(text, sampling.seed, sampling.stream, number) % len(candidates)]


def fake_choose(logits, choices, allowed, **_):
    tokens = [
        token_after(logits[row], sampling, number, None if allowed is None else allowed[place])
        for place, (row, sampling, number) in enumerate(choices)
    ]
    return np.array(tokens), np.zeros(len(tokens))


class FakeChoices:
    @staticmethod
    def of(samplings, size):
        assert len(samplings) <= size
        return samplings + [samplings[0]] * (size - len(samplings))


@pytest.fixture(scope="module", autouse=True)
def fake_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "extend", fake_extend)
        patch.setattr(engine, "choose", fake_choose)
        patch.setattr(engine, "Choices", FakeChoices)
        patch.setattr(engine, "empty_pages", lambda _gpt, num_pages, _dtype, _sharding: [None] * num_pages)
        yield


class Some:
    """A number of tokens, none of them 1."""

    def __init__(self, count):
        self.count, self.seen = count, []

    def allowed(self):
        return np.array([True, False, True]) & (len(self.seen) < self.count)

    def accept(self, token):
        self.seen.append(token)


def alone(request, num_positions):
    """The answer to a request by its definition."""
    text, tokens = list(request.tokens), []
    constraint = None if request.constraint is None else Some(request.constraint.count)
    while len(tokens) < request.max_tokens:
        allowed = None if constraint is None else constraint.allowed()
        if allowed is not None and not allowed.any():
            break
        tokens.append(token_after(tuple(text[-num_positions:]), request.sampling, len(tokens), allowed))
        text.append(tokens[-1])
        if constraint is not None:
            constraint.accept(tokens[-1])
        if tokens[-1] in request.stop_tokens:
            break
    return tokens


def scores(request):
    text = tuple(request.tokens)
    return [-(mixed("score", text[:at], text[at]) % 1000) for at in range(request.scored_from or len(text), len(text))]


def made(num_positions, **sizes):
    config = SimpleNamespace(sequence_length=num_positions, block=None)
    gpt = SimpleNamespace(vocab_size=VOCAB, separator=None, num_classes=1, config=config, router=TopK())
    return TextEngine(gpt, None, {"weights": np.zeros(1)}, TextEngineConfig(**sizes))


def assert_every_page_is_somewhere(made):
    sequences = made.pool
    of_tree = tree_pages(sequences.tree.root)
    of_sequences = [
        page
        for sequence in sequences.running
        for page in sequence.table[sequence.num_shared : sequence.num_pages].tolist()
    ]
    assert sorted(sequences.free + of_tree + of_sequences) == list(range(made.num_pages))


@settings(max_examples=250)
@given(st.integers(0, 2**32))
def test_answers_are_those_of_each_request_alone(seed):
    """With little memory and much of it, texts that slide, go back, are cancelled, interrupted, alike, bound, late."""
    chance = random.Random(seed)
    num_positions = chance.randint(2, 14)
    one = made(
        num_positions,
        batch=chance.randint(1, 6),
        cache_tokens=chance.randint(num_positions, 3 * num_positions),
        prefill_passages=chance.randint(1, 3),
        prefill_length=chance.randint(1, 4),
        share_prefixes=chance.random() < 0.8,
    )
    answers = []

    def submit():
        text = [chance.randrange(VOCAB) for _ in range(chance.randint(1, num_positions))]
        if answers and chance.random() < 0.6:
            other = list(chance.choice(answers).request.tokens)
            text = other if chance.random() < 0.3 else (other[: chance.randint(0, len(other))] + text)[:num_positions]
        answers.append(
            one.submit(
                Request(
                    text,
                    chance.choice([0, 1, 2, 5, num_positions + 3]),
                    Sampling(seed=chance.randrange(3)),
                    frozenset({1}) if chance.random() < 0.2 else frozenset(),
                    Some(chance.randint(0, 4)) if chance.random() < 0.2 else None,
                    chance.randint(1, len(text)) if chance.random() < 0.4 else None,
                )
            )
        )

    for _ in range(chance.randint(1, 10)):
        submit()
    for _ in range(5000):
        if one.is_idle:
            break
        if chance.random() < 0.05:
            with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(engine, "extend", interrupted)
                one.step()
        one.step()
        assert_every_page_is_somewhere(one)
        if chance.random() < 0.1 and len(answers) < 20:
            submit()
        if chance.random() < 0.05:
            one.cancel(chance.choice(answers))
    assert one.is_idle
    assert one.pool.tree.num_locked == 0
    for answer in answers:
        expected = alone(answer.request, num_positions)
        if answer.reason == "cancelled":
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.tokens == expected
            if not (answer.reason == "end" and not expected):
                assert answer.text_log_probs.tolist() == scores(answer.request)


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_steady_supply_of_one_text_does_not_keep_others_waiting():
    one = made(16, batch=2, cache_tokens=100)
    for stream in range(4):
        one.submit(Request([1, 1], 3, Sampling(stream=stream)))
    one.step()
    other = one.submit(Request([2, 1], 2))
    for stream in range(40):
        while one.pool.num_waiting < 3:
            one.submit(Request([1, 1], 3, Sampling(stream=stream)))
        one.step()
    assert other.reason == "length"


def test_a_text_that_slides_does_not_keep_others_waiting():
    one = made(4, batch=3, prefill_passages=1, prefill_length=4)
    slides = one.submit(Request([1, 2, 0, 1], 1000))
    others = [one.submit(Request([number], 2)) for number in range(2)]
    for _ in range(20):
        one.step()
    assert [other.reason for other in others] == ["length", "length"]
    assert len(slides.tokens) > 5
    assert slides.reason is None


def test_a_constraint_that_raises_ends_its_own_request():
    class Broken(Some):
        def accept(self, token):
            super().accept(token)
            if len(self.seen) == 2:
                raise ValueError("broken")

    one = made(8, batch=3)
    requests = [Request([1, number], 4, constraint=Broken(9) if number == 1 else None) for number in range(3)]
    answers = one.answers(requests)
    assert [answer.reason for answer in answers] == ["length", "failed", "length"]
    assert str(answers[1].error) == "broken"
    for answer in (answers[0], answers[2]):
        assert answer.tokens == alone(answer.request, 8)
    assert_every_page_is_somewhere(one)
