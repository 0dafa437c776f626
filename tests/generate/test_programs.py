"""Programs of given and generated parts."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.data.tokenizer import ByteTokenizer
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.programs import Gen, Writer
from swift.generate.request import GREEDY, Sampling
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits

EXPERTS = ExpertConfig(num_classes=4, top_k=2)
SHAPE = ModelConfig(num_layers=2, model_dim=8, num_heads=2, ffn_dim=12, sequence_length=64)


@pytest.fixture(scope="module")
def weights():
    gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
    return gpt, gpt.unpack(gpt.init(jax.random.key(3)))


@pytest.fixture
def writer(weights):
    gpt, values = weights
    return Writer(TextEngine(gpt, EXPERTS, values, TextEngineConfig(batch=4)), ByteTokenizer())


WARM = Sampling(temperature=2.0, top_k=100, seed=1)


def test_parts_follow_each_other(writer):
    prompt = writer.prompt("One, ")
    prompt += Gen("two", max_tokens=5, sampling=GREEDY)
    prompt += ", three, "
    prompt += Gen("four", max_tokens=4, sampling=WARM)
    prompt += "."
    assert prompt.text == f"One, {prompt['two']}, three, {prompt['four']}."
    other = writer.prompt("One, ")
    other += Gen("two", max_tokens=5, sampling=GREEDY)
    assert other["two"] == prompt["two"]
    with pytest.raises(KeyError):
        other["four"]


def test_forks_share_their_beginning_and_choose_by_themselves(writer):
    prompt = writer.prompt("A beginning that all of them share. ")
    forks = prompt.fork(3)
    for fork in forks:
        fork += Gen("end", max_tokens=6, sampling=WARM)
    ends = prompt.join(forks)["end"]
    assert len(set(ends)) == 3
    assert [fork.text for fork in forks] == [f"A beginning that all of them share. {end}" for end in ends]
    assert writer.engine.computed.prompt_tokens == len("A beginning that all of them share. ")


def test_many_runs_of_a_program_are_those_one_by_one(weights):
    def program(prompt, question):
        prompt += f"Q: {question} A: "
        prompt += Gen("answer", max_tokens=5, sampling=WARM)
        answer = prompt["answer"]
        prompt += Gen("again", max_tokens=3, sampling=WARM)
        return answer, prompt["again"]

    questions = [(f"question {number}",) for number in range(7)]
    writers = [Writer(TextEngine(*weights[:1], EXPERTS, weights[1]), ByteTokenizer()) for _ in range(2)]
    together = writers[0].run(program, questions)
    assert together == [program(writers[1].prompt(), *question) for question in questions]
    assert writers[0].engine.computed.calls < writers[1].engine.computed.calls
    assert len(set(together)) > 3


def test_an_error_of_a_program_is_its_own(writer):
    def program(prompt, text):
        prompt += text
        prompt += Gen("end", max_tokens=2, sampling=GREEDY)
        try:
            return prompt["end"]
        except SettingError as error:
            return str(error)

    found = writer.run(program, [("fine",), ("x" * 70,), ("well",)])
    assert found[1] == "len(Request.tokens) = 70: must be from 1 to 64, the positions of the model"
    assert len(found[0]) == len(found[2]) == 2


def test_the_likeliest_choice_is_taken(writer, weights):
    """By the sum of its tokens' log-probabilities, as the whole model has them."""
    gpt, values = weights
    begin, choices = "The answer is ", ["yes", "no", "maybe", "n!"]
    log_probs_of = jax.jit(lambda tokens: jax.nn.log_softmax(plain_logits(gpt, EXPERTS, values, tokens)[0]))

    def log_prob(choice):
        tokens = np.frombuffer((begin + choice).encode(), np.uint8).astype(np.int32)
        log_probs = np.asarray(log_probs_of(tokens[None]))
        rows = np.arange(len(begin), len(tokens))
        return log_probs[rows - 1, tokens[rows]].sum()

    prompt = writer.prompt(begin)
    prompt += Gen("answer", choices=choices)
    prompt += "."
    assert prompt["answer"] == max(choices, key=log_prob)
    assert prompt.text == f"{begin}{prompt['answer']}."


@pytest.mark.parametrize("choices", [[], ["a", ""], ["no", "none"], ["same", "same"]])
def test_choices_that_cannot_be(choices):
    with pytest.raises(SettingError, match=r"Gen\.choices = .*: must "):
        Gen("answer", choices=choices)


def test_choices_of_which_one_is_too_long(writer):
    """Leave nothing in the engine, which answers the others."""
    prompt = writer.prompt("Go: ")
    prompt += Gen("answer", choices=["yes", "no" * writer.engine.gpt.config.sequence_length])
    with pytest.raises(SettingError, match=r"len\(Request\.tokens\) = "):
        prompt["answer"]
    assert (writer.engine.is_idle, writer.engine.computed.calls) == (True, 0)
    other = writer.prompt("Go: ")
    other += Gen("answer", choices=["yes", "no"])
    assert other["answer"] in ("yes", "no")


def test_an_answer_ends_before_a_stop(writer):
    free = writer.prompt("Go: ")
    free += Gen("all", max_tokens=12, sampling=WARM)
    stop = free["all"][4:6]
    prompt = writer.prompt("Go: ")
    prompt += Gen("some", max_tokens=12, sampling=WARM, stop=stop)
    assert prompt["some"] == free["all"][: free["all"].index(stop)]


def test_an_answer_matches_a_regular_expression(writer):
    pytest.importorskip("llguidance")
    prompt = writer.prompt("Date: ")
    prompt += Gen("date", regex=r"20[0-9]{2}-(0[1-9]|1[0-2])", sampling=WARM)
    prompt += " and "
    prompt += Gen("word", regex=r"[a-c]{2,5}", sampling=WARM)
    assert re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])", prompt["date"])
    assert re.fullmatch(r"[a-c]{2,5}", prompt["word"])


@pytest.mark.parametrize(
    ("regex", "line"), [("(", "cannot be used: "), (r"[^\s\S]", "matches no text"), (r"a\b^", "cannot be used: ")]
)
def test_a_regular_expression_that_nothing_satisfies(writer, regex, line):
    pytest.importorskip("llguidance")
    prompt = writer.prompt("x")
    prompt += Gen("y", regex=regex)
    with pytest.raises(SettingError, match=rf"Gen\.regex = .*{line}"):
        prompt["y"]
    other = writer.prompt("x")
    other += Gen("y", max_tokens=1, sampling=GREEDY)
    assert len(other["y"]) == 1


def test_a_name_is_that_of_one_part(writer):
    prompt = writer.prompt("x")
    prompt += Gen("y", max_tokens=1)
    with pytest.raises(SettingError, match=r"Gen\.name = 'y': must not be that of an earlier part"):
        prompt += Gen("y", max_tokens=1)
    with pytest.raises(TypeError, match="a part of a prompt is a text or a Gen, not 5"):
        prompt += 5


def test_choices_of_parts_forks_and_streams_differ(writer):
    prompt = writer.prompt("The same beginning: ")
    texts = set()
    for number, fork in enumerate([*prompt.fork(1), *prompt.fork(1), prompt]):
        fork += Gen("a", max_tokens=6, sampling=WARM)
        texts.add(fork["a"])
        assert len(texts) == number + 1
    for stream in range(2):
        again = writer.prompt("The same beginning: ")
        again += Gen("a", max_tokens=6, sampling=replace(WARM, stream=stream))
        texts.add(again["a"])
    assert len(texts) == 4  # stream 0 is that of the prompt before


def test_what_is_there_can_be_read_though_a_later_part_fails(writer):
    prompt = writer.prompt("x")
    prompt += Gen("a", max_tokens=2, sampling=GREEDY)
    prompt += "\ud800"  # has no bytes
    prompt += Gen("b", max_tokens=2, sampling=GREEDY)
    assert len(prompt["a"]) == 2
    with pytest.raises(UnicodeEncodeError):
        prompt["b"]
    with pytest.raises(UnicodeEncodeError):
        _ = prompt.text
    other = writer.prompt("x")
    other += Gen("a", max_tokens=2, sampling=GREEDY)
    assert other["a"] == prompt["a"]


def test_an_error_ends_the_other_runs(writer):
    def program(prompt, number):
        prompt += "text "
        prompt += Gen("a", max_tokens=30, sampling=GREEDY)
        if number == 1:
            raise ValueError("mine")
        return prompt["a"]

    with pytest.raises(ValueError, match="mine"):
        writer.run(program, [(number,) for number in range(4)])
    assert writer.engine.is_idle or writer.engine.pool.running
    after = writer.prompt("text ")
    after += Gen("a", max_tokens=2, sampling=GREEDY)
    assert len(after["a"]) == 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"stop": ""}, "Gen.stop = '': must not be empty"),
        ({"choices": "yes"}, "Gen.choices = 'yes': must be a list of texts"),
        ({"choices": ["a"], "regex": "a"}, "Gen.regex = 'a': cannot be combined with choices"),
        ({"max_tokens": 0}, "Gen.max_tokens = 0: must be a whole number of at least 1"),
    ],
    ids=["stop", "choices", "both", "none"],
)
def test_a_part_that_cannot_be(settings, line):
    with pytest.raises(SettingError, match=re.escape(line)):
        Gen("x", **settings)
