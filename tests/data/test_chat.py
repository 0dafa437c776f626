"""Chats as tokens and weights, rendered by a tokenizer's chat template; packed, indexed and read again."""

import json
import pickle
import sys

import numpy as np
import pytest

from swift.config.gin_reader import load_experiment
from swift.data.config import DataConfig, Mixture
from swift.data.index import corpus_stream, find_index
from swift.data.loader import check_same_data
from swift.data.operators import Chat
from swift.data.pipeline import Pipeline, plain_plan
from swift.data.records import JsonLines, Rows
from swift.data.samples import Samples
from swift.data.sources import DataError, TextFiles
from swift.errors import SettingError
from tests.data.chats import CHAT, CHATML, MARKED, OLMOE, write_tokenizer

pytest.importorskip("jinja2")


def answers_of(tokenizer, messages, **options) -> tuple[str, list[str]]:
    """The text of a chat, and its runs of tokens that are learned."""
    sample = Samples(plain_plan(Pipeline(Rows([{"messages": messages}])).then(Chat(tokenizer, **options))), seed=0)[0]
    tokens, weights = sample["tokens"], sample["weights"]
    assert weights.dtype == np.float32
    assert set(weights) <= {0, 1}
    begins = np.flatnonzero(np.diff(weights, prepend=0))
    runs = np.split(tokens, begins)
    return tokenizer.decode(tokens), [tokenizer.decode(run) for run in runs[1::2]]


@pytest.mark.parametrize(
    ("template", "end", "config"),
    [
        (CHATML, "<|im_end|>", {}),
        (MARKED, "<|im_end|>", {}),
        (OLMOE, "<|end|>", {"bos_token": {"content": "<|end|>"}, "eos_token": "<|end|>"}),
        (OLMOE, "<|end|>", {}),  # the end of the tokenizer that the run names
    ],
)
def test_answers_and_their_ends_are_learned(tmp_path, template, end, config):
    tokenizer = write_tokenizer(tmp_path, template, **config)
    text, answers = answers_of(tokenizer, CHAT)
    assert answers == [f"4 \u00e9\u20ac{end}", f" yes{end}"]
    assert "sure?" in text


def test_the_template_of_the_configuration_is_used_without_a_file(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    for number, template in enumerate([CHATML, named]):
        tokenizer = write_tokenizer(tmp_path / str(number), None, chat_template=template)
        assert len(answers_of(tokenizer, CHAT)[1]) == 2


LAST_ONLY = "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.content }}]{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (LAST_ONLY, CHAT, r"renders what stands before the end of message 2 in another way when more follows"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            CHAT,
            "the answer of message 2 begins",
        ),
        (CHATML, CHAT[1:], "the first message is an answer"),
        (CHATML, CHAT[:1], "no message of the role 'assistant'"),
        (CHATML, "hello", "the field 'messages' is not a list of messages, each with a role"),
        (CHATML, [{"content": "x"}], "the field 'messages' is not a list of messages, each with a role"),
        ("{{ raise_exception('only\nusers') }}", CHAT, r"chat_template.jinja cannot render the chat: only"),
        ("{% for %}", CHAT, r"chat_template.jinja is not a chat template: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHAT, r"cannot render the chat: access to attribute"),
        ("{{ messages.append(1) }}", CHAT, r"cannot render the chat: access to attribute 'append'"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", CHAT, r"cannot render the chat: a namespace has no"),
        ("{{ strftime_now('%Y') }}", CHAT, r"cannot render the chat: 'strftime_now' is undefined"),
    ],
)
def test_what_cannot_be_rendered_or_told_apart_is_refused(tmp_path, template, messages, said):
    with pytest.raises(DataError, match=said) as raised:
        answers_of(write_tokenizer(tmp_path, template), messages)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_a_template_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match=r"Chat.tokenizer = .* put one there as chat_template.jinja"):
        Chat(write_tokenizer(tmp_path, None)).template  # noqa: B018
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingError, match=r"tokenizer_config.json'?: is not JSON"):
        Chat(write_tokenizer(tmp_path, None)).template  # noqa: B018
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(SettingError, match=r"extra 'tokenizers': pip install"):
        Chat(write_tokenizer(tmp_path, CHATML)).template  # noqa: B018


def test_an_operator_that_has_rendered_goes_to_another_process(tmp_path):
    chat = Chat(write_tokenizer(tmp_path, CHATML))
    expected = chat.function({"messages": CHAT})
    found = pickle.loads(pickle.dumps(chat)).function({"messages": CHAT})
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])


def corpus_of(tmp_path, template=CHATML, num=12, **options) -> DataConfig:
    lines = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "B" * (1 + n)}]}
        for n in range(num)
    ]
    if not (tmp_path / "chats.jsonl").exists():
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = write_tokenizer(tmp_path, template)
    source = Pipeline(JsonLines(str(tmp_path / "chats.jsonl")), (Chat(tokenizer, **options),))
    return DataConfig(source, tokenizer, validation_share=0.3)


def stream_of(config, split, path=None) -> tuple[str, str]:
    """The text of a split, and the part of it that is learned."""
    stream = corpus_stream(config, split, path)
    tokens, weights = stream.read(0, stream.num_tokens), stream.read_weights(0, stream.num_tokens)
    return config.tokenizer.decode(tokens), config.tokenizer.decode(tokens[weights > 0])


def test_an_index_keeps_the_weights_beside_the_tokens(make_loader, tmp_path):
    config = corpus_of(tmp_path)
    path = find_index(config, tmp_path / "kept", print)
    for split in ("train", "validation"):
        text, learned = stream_of(config, split, path)
        assert (text, learned) == stream_of(config, split)
        chats = text.split("<|end|>")[:-1]
        assert learned == "".join(chat.split("assistant\n")[1].removesuffix("\n") for chat in chats)
        loaders = [make_loader(config, split, corpus=corpus) for corpus in (path, None)]
        assert loaders[0].state() == loaders[1].state()
        for step in range(3):
            batch, other = (loader.batch(step) for loader in loaders)
            np.testing.assert_array_equal(batch.weights, other.weights)
            letters = batch.labels == config.tokenizer.encode("B")[0]
            assert (batch.weights[letters & batch.valid] == 1).all()
            assert not batch.weights[~batch.valid].any()
        is_read = np.zeros((2, 3), bool)
        is_read[1, 2] = True
        part = loaders[0].batch(1, is_read)
        np.testing.assert_array_equal(part.weights, loaders[0].batch(1).weights * is_read[..., None])


def test_other_weights_are_other_data(make_loader, tmp_path):
    """A template that marks other answers gives the same tokens; a run does not resume with them."""
    config = corpus_of(tmp_path, MARKED)
    before = make_loader(config).state()
    kept = find_index(config, tmp_path / "kept", print)
    other = corpus_of(tmp_path, MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    assert stream_of(other, "train")[0] == stream_of(config, "train")[0]
    assert find_index(other, tmp_path / "kept", print) != kept
    with pytest.raises(SettingError, match="the saved data state"):
        check_same_data(before, make_loader(other).state())


def test_a_damaged_file_of_weights_is_written_again(tmp_path):
    config = corpus_of(tmp_path)
    path = find_index(config, tmp_path / "kept", print)
    weights = (path / "train_weights").read_bytes()
    (path / "train_weights").write_bytes(weights[:-4] + b"\0\0\0\x41")
    assert find_index(config, tmp_path / "kept", print) == path
    assert (path / "train_weights").read_bytes() == weights


def test_a_mixture_learns_all_of_its_texts(make_loader, tmp_path):
    chats = corpus_of(tmp_path)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("ccccccccc")
    mixture = Mixture((chats.source, TextFiles(str(tmp_path / "*.txt"))), (1.0, 1.0))
    batch = make_loader(DataConfig(mixture, chats.tokenizer, validation_share=0.3)).batch(0)
    text = batch.labels == chats.tokenizer.encode("c")[0]
    assert text.any()
    assert (batch.weights[text] == 1).all()
    assert not batch.weights.all()


def test_a_separator_of_chats_is_in_none_of_them(tmp_path):
    config = corpus_of(tmp_path, end_of_document="<|pad|>")
    text, learned = stream_of(config, "train")
    assert config.separator == config.tokenizer.number_of("<|pad|>")
    assert text.endswith("<|im_end|>\n<|pad|>")
    assert "<|pad|>" not in learned
    with pytest.raises(SettingError, match=r"Chat.end_of_document = '<\|no\|>': .* has no such token"):
        find_index(corpus_of(tmp_path, end_of_document="<|no|>"), tmp_path / "kept", print)
    with pytest.raises(DataError, match=r"a chat contains '<\|im_end\|>', which separates chats"):
        stream_of(corpus_of(tmp_path, end_of_document="<|im_end|>"), "train")


def test_a_chat_that_ends_with_the_separator_gets_no_second_one(tmp_path):
    text, learned = stream_of(corpus_of(tmp_path, OLMOE), "train")
    assert "<|end|><|end|>" not in text
    assert learned.count("<|end|>") == text.count("<|end|>")


GIN = """
DataConfig.source = @Pipeline()
Pipeline.source = @JsonLines()
JsonLines.pattern = 'chats.jsonl'
Pipeline.operators = (@Chat(),)
Chat.tokenizer = @TokenizerFile()
TokenizerFile.path = 'tokenizer.json'
TokenizerFile.end_of_document = '<|end|>'
DataConfig.tokenizer = @TokenizerFile()
"""


def test_settings_that_would_cut_chats_are_refused(tmp_path, monkeypatch):
    corpus_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(GIN)
    assert load_experiment(tmp_path / "mine.gin").data.weighs_tokens
    with pytest.raises(SettingError, match=r"Experiment.separate_documents = True: needs Chat.end_of_document"):
        load_experiment(tmp_path / "mine.gin", ["Experiment.separate_documents=True"])
    apart = ["Experiment.separate_documents=True", "Chat.end_of_document='<|pad|>'"]
    assert load_experiment(tmp_path / "mine.gin", apart).data.chats[0].end_of_document == "<|pad|>"
    with pytest.raises(SettingError, match=r"Chat.tokenizer = .* must be DataConfig.tokenizer, ByteTokenizer"):
        load_experiment(tmp_path / "mine.gin", ["DataConfig.tokenizer=@ByteTokenizer()"])


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0], r"a document has 3 tokens and weights of shape \[1\]"),
        ([1, -1, 0], "a document has a weight that is not a number from 0"),
        ([1, float("nan"), 0], "a document has a weight that is not a number from 0"),
        (["a", "b", "c"], "the weights of a document are not numbers"),
    ],
)
def test_wrong_weights_of_a_users_own_are_refused(weights, said):
    records = Rows([{"text": "abc", "mask": weights}] * 3)
    source = Pipeline(records).map(lambda s: {"weights": s["mask"]}, reads=("mask",), writes=("weights",))
    with pytest.raises(DataError, match=said):
        corpus_stream(DataConfig(source), "train", None)


def test_weights_of_a_users_own(make_loader):
    """Two of three letters count half, and the separator of a document with weights nothing."""
    records = Rows([{"text": "abc", "weights": [0, 0.5, 0.5]}] * 30)
    ignored, heeded = Pipeline(records), Pipeline(records).map(dict, reads=("weights",), writes=("weights",))
    assert make_loader(DataConfig(ignored)).batch(0).weights is None
    batch = make_loader(DataConfig(heeded)).batch(0)
    np.testing.assert_array_equal(batch.weights, np.where(batch.labels > ord("a"), 0.5, 0))
