"""Validation by source of a mixture, and the bytes of text that its tokens stand for."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from swift.data.config import DataConfig, Mixture
from swift.data.sources import InMemory
from swift.data.stream import open_stream
from swift.data.tokenizer import ByteTokenizer, TokenizerFile, text_bytes
from swift.errors import SettingError
from tests.data.test_mixture import MIXED, ONE, OTHER, letters

TEXTS = [
    "naïve café \N{SNOWMAN} and more  spaces\n",
    "plain words, plain words",
    "\N{GREEK SMALL LETTER ALPHA}" * 30,
] * 8


def test_the_batches_of_a_source_have_its_windows_alone(make_loader):
    loader = make_loader(MIXED, "validation", shape=(1, 4, 5))
    assert [(part.name, part.weight) for part in loader.parts] == [("0", 3.0), ("1", 1.0)]
    assert [part.batches[0] for part in loader.parts] == [0, loader.parts[0].batches.stop]
    assert loader.parts[-1].batches.stop == loader.num_batches_per_epoch
    for part, source, letter in zip(loader.parts, (ONE, OTHER), "ab", strict=True):
        alone = make_loader(replace(MIXED, source=source), "validation", shape=(1, 4, 5))
        assert alone.parts == (alone.parts[0]._replace(name="", weight=1.0, batches=range(len(part.batches))),)
        for index in part.batches:
            batch, same = loader.batch(index), alone.batch(index - part.batches.start)
            assert set(letters(batch)) <= {letter, "\0"}
            for leaf, other in zip(batch, same, strict=True):
                np.testing.assert_array_equal(leaf, other)
    again = loader.batch(loader.num_batches_per_epoch)  # the next pass
    np.testing.assert_array_equal(again.labels, loader.batch(0).labels)


def test_sources_have_names(make_loader):
    named = replace(MIXED, source=Mixture((ONE, OTHER), (3.0, 1.0), ("web", "code.py")))
    assert [part.name for part in make_loader(named, "validation").parts] == ["web", "code.py"]
    for names in (("a",), ("a", "a"), ("a", "b/c"), ("a", ""), ("a", 1)):
        with pytest.raises(SettingError, match=r"Mixture.names = .*must be 2 different names"):
            Mixture((ONE, OTHER), (3.0, 1.0), names)


def num_bytes(loader) -> int:
    return sum(loader.num_bytes(step) for step in range(loader.num_batches_per_epoch))


def test_a_pass_has_the_bytes_of_all_documents(make_loader):
    """The first token of a split is never a label; the tokens of the texts are their bytes."""
    config = DataConfig(InMemory(TEXTS), validation_share=0.4)
    tokens = open_stream(config, "validation").read(0, 10**6)
    text = ByteTokenizer().decode(tokens[1:])
    loader = make_loader(config, "validation", shape=(2, 2, 7))
    assert num_bytes(loader) == num_bytes(loader) == len(text.replace("\0", "").encode()) > 100


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_the_bytes_of_a_tokenizer_file(make_loader, tmp_path, is_byte_level):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    if is_byte_level:
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel()])
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        alphabet = []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    model.add_tokens(["spaces"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(str(tmp_path / "tokenizer.json"))
    config = DataConfig(InMemory(TEXTS), tokenizer, validation_share=0.4)
    loader = make_loader(config, "validation", shape=(2, 2, 7))
    if not is_byte_level:
        assert text_bytes(tokenizer) is None
        assert loader.num_bytes(0) is None
        return
    stream = open_stream(config, "validation").read(0, 10**6)
    documents = [
        list(group) for is_end, group in itertools.groupby(stream, lambda t: t == tokenizer.separator) if not is_end
    ]
    first = model.id_to_token(int(stream[0]))
    expected = sum(len(tokenizer.decode(np.array(document)).encode()) for document in documents)
    assert num_bytes(loader) == expected - int(text_bytes(tokenizer)[stream[0]])
    assert text_bytes(tokenizer)[stream[0]] == len(model.decoder.decode([first]).encode())


def test_bytes_of_another_tokenizer_are_not_known(make_loader):
    class Words(ByteTokenizer):
        """A user's own."""

        vocab_size = 300

    assert make_loader(DataConfig(InMemory(TEXTS), Words()), "validation").num_bytes(0) is None
