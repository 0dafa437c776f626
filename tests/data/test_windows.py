import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.data.config import DataConfig
from swift.data.sources import StandardLibrary, TokenFile
from swift.data.stream import TokenStream
from swift.data.windows import Windows, count_windows


def stream_of(tokens, spans):
    """A stream of spans (start, stop) of an array."""
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    return TokenStream(np.array(tokens, np.uint16), starts, np.cumsum(lengths) - lengths, int(lengths.sum()))


@st.composite
def streams(draw):
    """A stream with gaps between its spans, and its tokens."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(1, 4), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([0, *(length + gap for length, gap in zip(lengths, gaps, strict=True))])[:-1]
    spans = [(int(start), int(start) + length) for start, length in zip(starts, lengths, strict=True)]
    tokens = np.arange(1, spans[-1][1] + 5) % 251
    return stream_of(tokens, spans), np.concatenate([tokens[start:stop] for start, stop in spans])


@given(streams(), st.integers(0, 60), st.integers(0, 60))
def test_any_part_of_a_stream_can_be_read(case, start, stop):
    stream, tokens = case
    assert stream.read(start, stop).tolist() == tokens[start:stop].tolist()


@given(streams(), st.integers(1, 20))
def test_windows_give_the_stream_back(case, sequence_length):
    stream, tokens = case
    windows = Windows(stream, sequence_length, count_windows(len(tokens), sequence_length))
    batches = [windows[index] for index in range(len(windows))]
    assert np.concatenate([[], *(batch.inputs[batch.valid] for batch in batches)]).tolist() == tokens[:-1].tolist()
    assert np.concatenate([[], *(batch.labels[batch.valid] for batch in batches)]).tolist() == tokens[1:].tolist()
    assert all(batch.valid[0] for batch in batches)
    assert all(batch.valid.all() for batch in batches[:-1])


def test_padding_is_at_the_end_and_invalid():
    stream = stream_of(range(1, 8), [(0, 7)])
    windows = Windows(stream, 4, 3)
    last, beyond = windows[1], windows[2]
    assert last.inputs.tolist() == [5, 6, 0, 0]
    assert last.labels.tolist() == [6, 7, 0, 0]
    assert last.valid.tolist() == [True, True, False, False]
    assert not beyond.valid.any()
    assert not beyond.inputs.any()
    assert (last.inputs.dtype, last.labels.dtype, last.valid.dtype) == (np.int32, np.int32, np.bool_)


@pytest.mark.parametrize(("num_tokens", "expected"), [(2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_count_of_windows(num_tokens, expected):
    assert count_windows(num_tokens, 4) == expected


@given(streams(), st.data())
def test_a_checksum_tells_other_tokens(case, data):
    stream, _ = case
    position = data.draw(st.integers(0, stream.num_tokens - 1))
    tokens_N = stream.tokens_N.copy()
    span = int(np.searchsorted(stream.offsets_S, position, side="right")) - 1
    tokens_N[stream.starts_S[span] + position - stream.offsets_S[span]] += 1
    changed = TokenStream(tokens_N, stream.starts_S, stream.offsets_S, stream.num_tokens)
    assert changed.checksum() != stream.checksum()
    assert stream.checksum() == TokenStream(*vars(stream).values()).checksum()


@pytest.mark.parametrize("position", [0, 4095, 4096, 99_999])
def test_a_checksum_sees_both_ends_of_a_long_stream(position):
    tokens = np.arange(100_000) % 251
    changed = tokens.copy()
    changed[position] += 1
    spans = [(0, len(tokens))]
    assert stream_of(changed, spans).checksum() != stream_of(tokens, spans).checksum()


def test_a_vocabulary_of_texts_is_the_tokenizers():
    assert DataConfig(StandardLibrary()).vocab_size == 256
    assert DataConfig(TokenFile("t.bin", vocab_size=50257)).vocab_size == 50257
