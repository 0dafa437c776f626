"""Questions put to an engine, against the whole model run anew for every text."""

import json
from copy import copy
from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.data.tokenizer import TokenizerFile
from swift.errors import RunError, SettingError
from swift.evaluate.scoring import continuation_of, judged, prepare_questions
from swift.evaluate.tasks import Completion, Question, Selection

LENGTH = 64
"""Positions of the model."""
SHOTS = "Q: a A: b\nQ: c A: d\n"
CHOICES = [
    ("Q: e A:", (" f", " something long", " g")),
    ("Q: h A:", (" no", " none", "\u00e9\u00e9", " f")),
    ("", ("alone", "two")),
    ("x" * 80, (" f", " a longer one", "y" * LENGTH)),
]


def test_choices_have_the_log_probabilities_of_the_whole_model(whole):
    """One that begins another, a prompt that is empty, and one that is longer than the positions, too."""
    prompts = [(SHOTS + prompt if prompt.startswith("Q") else prompt, choices) for prompt, choices in CHOICES]
    questions = [
        Question(4 * number + right, "task", prompt, Selection(choices, right))
        for number, (prompt, choices) in enumerate(prompts)
        for right in range(len(choices))
    ]
    judgements = whole.asked(questions)
    for question, judgement in zip(questions, judgements, strict=True):
        begin = question.prompt.encode() or b"\0"
        expected = [whole.score(begin, choice.encode()) for choice in question.right.choices]
        np.testing.assert_allclose(judgement.log_probs, expected, rtol=1e-4)
        per_byte = [
            score / len(choice.strip().encode()) for score, choice in zip(expected, question.right.choices, strict=True)
        ]
        likeliest = int(np.argmax(expected)), int(np.argmax(per_byte))
        assert tuple(judgement.correct.values()) == tuple(one == question.right.answer for one in likeliest)
        longest = max(len(begin) + len(choice.encode()) for choice in question.right.choices)
        assert judgement.unseen_tokens == max(0, longest - LENGTH - 1)


def test_a_long_choice_may_be_right_for_its_bytes():
    """The white space before a choice is no part of its length; a letter may have several bytes."""
    right = Selection((" a", "   \u00e9\u00e9"), 1)
    assert judged(right, np.array([-2.0, -7.9])) == {"accuracy": False, "accuracy_per_byte": True}
    assert judged(right, np.array([-2.0, -8.1])) == {"accuracy": False, "accuracy_per_byte": False}


def completion(line, prompt, count, stops=(), answer=""):
    return Question(line, "task", prompt, Completion((answer,), stop=stops, max_tokens=count))


def test_texts_are_those_of_the_whole_model(whole):
    """Beyond the positions of the model, too."""
    questions = [completion(*one) for one in [(1, SHOTS, 12), (2, SHOTS + "Q", 9), (3, "z" * 70, 5), (4, "", 4)]]
    for question, judgement in zip(questions, whole.asked(questions), strict=True):
        begin = question.prompt.encode() or b"\0"
        assert judgement.text == whole.continued(begin, question.right.max_tokens, ())
        assert judgement.unseen_tokens == max(0, len(begin) - LENGTH)


def test_texts_end_before_a_stop(whole):
    free = {prompt: whole.continued(prompt.encode(), 12, ()) for prompt in (SHOTS, "Q: e A:", "hello", "a b c")}
    found = ((prompt, text, at) for prompt, text in free.items() for at in range(1, len(text)) if text[at].isascii())
    prompt, text, at = next(found)
    expected = text[: text.index(text[at])]
    (judgement,) = whole.asked([completion(1, prompt, 12, (text[at], "no such text"), expected)])
    assert judgement.text == expected
    assert judgement.correct == {"match": True}


def test_examples_are_read_once(whole):
    """Those before all questions, and a prompt before its choices."""
    ends = ("f", "gg")
    whole.asked([Question(number, "task", SHOTS + letter, Selection(ends, 0)) for number, letter in enumerate("abc")])
    texts = [(SHOTS + letter + end).encode() for letter in "abc" for end in ends]
    # Each choice is read from the token before it on, whose successor is scored.
    distinct = {text[:length] for text in texts for length in range(1, len(text))}
    assert whole.computed.prompt_tokens <= len(distinct) + 3


class Pairs:
    """Two letters that are equal make one token, and a space goes with the letter after it."""

    vocab_size, separator = 256, 0

    def encode(self, text):
        tokens, at = [], 0
        while at < len(text):
            wide = text[at : at + 2] if text[at] == " " or text[at : at + 2] == 2 * text[at] else text[at]
            tokens.append(ord(wide[-1]) + (128 if len(wide) == 2 else 0))
            at += len(wide)
        return np.array(tokens, np.uint8)

    def decode(self, tokens):
        return "".join((" " if token >= 128 else "") + chr(token % 128) for token in np.asarray(tokens).tolist())


@pytest.mark.parametrize(
    ("begin", "end", "tokens", "start"),
    [
        ("ab", "c", "abc", 2),
        ("a ", "b", "aB", 1),  # the space goes with the letter
        ("ab", "bc", "aBc", 1),  # a token reaches across the boundary
        ("b", "bc", "0Bc", 1),  # nothing is left before it
        ("", "ab", "0ab", 1),
        ("a", "", None, 0),
        ("a", "b" * 200, None, 0),
        ("a" * 201, "bc", "A" * 62 + "abc", 63),
    ],
)
def test_tokens_across_the_boundary_are_scored(begin, end, tokens, start):
    found = continuation_of(Pairs(), begin, end, LENGTH)
    if tokens is None:
        assert found is None
        return
    letters = "".join(
        "0" if token == 0 else chr(token % 128).upper() if token >= 128 else chr(token) for token in found.tokens
    )
    assert (letters, found.scored_from) == (tokens, start)


def test_a_choice_that_does_not_fit_is_named(whole):
    with pytest.raises(SettingError, match=r"mine\.jsonl, line 7, choices = 'yyy.*: must be of 1 to 64 tokens"):
        whole.asked([Question(7, "task", "x", Selection(("a", "y" * 65), 0))])


def test_a_model_without_probabilities(whole):
    broken = copy(whole)
    broken.weights = jax.tree.map(lambda leaf: leaf * np.nan, whole.weights)
    with pytest.raises(RunError, match="the model's probabilities are not numbers, as with the question of line 7"):
        broken.asked([Question(7, "task", "x", Selection(("a", "b"), 0))])


def test_texts_begin_as_prompts_do(whole, tmp_path):
    """With a tokenizer that has a token for it, choices and completions begin with that one, and only once."""
    pytest.importorskip("tokenizers")
    words = {"<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 20)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "</s>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}))
    begun = TokenizerFile(str(path), end_of_document="</s>", begin_of_prompt="<s>")
    for tokenizer, before in ((begun, (1,)), (replace(begun, begin_of_prompt=None), ())):
        found = continuation_of(tokenizer, "w5 w6", " w7", LENGTH)
        assert (found.tokens, found.scored_from) == ((*before, 5, 6, 7), len(before) + 2)
        assert continuation_of(tokenizer, "", "w7", LENGTH).tokens == ((*before, 7) if before else (2, 7))
        right = (Selection((" w7", " w8 w9"), 0), Completion(("w7",), max_tokens=3))
        questions = [Question(number, "task", "w5", of) for number, of in enumerate(right)]
        asked = prepare_questions(whole.engine(), tokenizer, "mine.jsonl", questions)
        requests = [request for one in asked for request in one.requests]
        assert [tuple(request.tokens)[: len(before) + 1] for request in requests] == [(*before, 5)] * 3
