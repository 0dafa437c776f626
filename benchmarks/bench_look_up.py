"""Bytes of the look-up of a sharded embedding, on real text: each distinct token once, hot rows copied, both.

Eight ranks, 4,096 tokens each in a micro-batch, rows of 2,048 bfloat16 numbers. The tokens are those of a byte-level
BPE of 50,000 tokens, trained on the standard library. The hottest rows, their number and the size of the buffers are
those that take the fewest bytes for sequences of the first half of the text; the tokens looked up are drawn from the
second. Bytes count the ids, the rows, their gradients, and copies and sums of hot rows, with buffers as they are sent:
also what a rank keeps, and places that stay empty.

Runs with ``Experiment.embedding = 'sharded'`` know nothing of the text: their rows are in the tokenizer's order, and
the size of their buffers and the number of hot rows follow from the number of tokens. A rank asks for each token once
in a micro-batch, and for those that several of its micro-batches need once in an iteration; told without and with the
latter.

R: ranks, M: micro-batches of an iteration, T: tokens of a rank.
"""

import itertools
import sys
from typing import Any

import numpy as np
from measure import publish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from swift.data.sources import StandardLibrary
from swift.models.vocabulary.lookup import choose_hot_rows, max_requests_per_round, num_hot_rows

RANKS, TOKENS, VOCABULARY = 8, 4096, 50_000
ID, ROW = 4, 2048 * 2
BUFFERS, HOT = (8, 16, 32), range(0, 4097, 64)
MOST = 0.25


def trained(texts: list[str]) -> Tokenizer:
    """Trains the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return tokenizer


def draw(rows: np.ndarray, num_microbatches: int, length: int, seed: int) -> np.ndarray:
    """Draws random sequences, and returns the rows of their tokens, ``[M, R, T]``."""
    shape = num_microbatches, RANKS, TOKENS // length
    starts = np.random.default_rng(seed).integers(0, len(rows) - length, shape)
    return rows[starts[..., None] + np.arange(length)].reshape(num_microbatches, RANKS, TOKENS)


def requests(row_T: np.ndarray, num_hot: int, *, once: bool) -> np.ndarray:
    """Counts the rows that a rank requests from each rank for a micro-batch."""
    asked = row_T[row_T >= num_hot]
    return np.bincount((np.unique(asked) if once else asked) % RANKS, minlength=RANKS)


def bytes_of(row_MRT: np.ndarray, num_hot: int, *, once: bool, buffer: int | None) -> float:
    """Computes the bytes of a rank in an iteration; with ``buffer`` None, buffers are exactly full."""
    total = 0.0
    for row_RT in row_MRT:
        counts_RR = np.stack([requests(row_T, num_hot, once=once) for row_T in row_RT])
        sent = counts_RR.sum() / RANKS if buffer is None else -(-counts_RR.max() // buffer) * buffer * RANKS
        total += sent * 2 * (ID + ROW)
    return float(total + 2 * num_hot * ROW)


def bytes_in_runs(token_MRT: np.ndarray, *, copies: bool) -> float:
    """Computes the bytes of a rank in an iteration as in runs, with or without copies of hot rows."""
    num_hot = num_hot_rows(TOKENS, VOCABULARY, len(token_MRT)) * copies
    one = np.zeros(len(token_MRT), np.int32)
    hot_R = [np.asarray(choose_hot_rows(token_MRT[:, rank], one, 1, VOCABULARY, num_hot)[0]) for rank in range(RANKS)]
    wanted = [
        [np.setdiff1d(token_T, hot) for token_T, hot in zip(token_RT, hot_R, strict=True)] for token_RT in token_MRT
    ]
    if num_hot:
        wanted.append([hot[hot >= 0] for hot in hot_R])
    sizes = [max_requests_per_round(TOKENS, RANKS)] * len(token_MRT) + [max_requests_per_round(num_hot, RANKS)]
    total = 0
    for wanted_R, size in zip(wanted, sizes, strict=False):
        most = max(np.bincount(rows % RANKS, minlength=RANKS).max() for rows in wanted_R)
        total += -(-most // size) * size * RANKS * 2 * (ID + ROW)
    return float(total)


def ratios(earlier_MRT: np.ndarray, row_MRT: np.ndarray, token_of_row: np.ndarray) -> dict[str, float]:
    """Computes bytes over those of a plain look-up, with hot rows and buffers chosen for ``earlier_MRT``."""
    plain = bytes_of(row_MRT, 0, once=False, buffer=None)

    def over_plain(num_hot: int, *, once: bool) -> float:
        buffer = min(BUFFERS, key=lambda size: bytes_of(earlier_MRT, num_hot, once=once, buffer=size))
        return round(bytes_of(row_MRT, num_hot, once=once, buffer=buffer) / plain, 3)

    def best(*, once: bool) -> int:
        return min(HOT, key=lambda num_hot: bytes_of(earlier_MRT, num_hot, once=once, buffer=BUFFERS[0]))

    return {
        "plain, MB of a rank": round(plain / 1e6, 2),
        "neither, in rounds": over_plain(0, once=False),
        "each once": over_plain(0, once=True),
        "hot rows copied": over_plain(best(once=False), once=False),
        "both": over_plain(best(once=True), once=True),
        "hot rows": best(once=True),
        "in runs, without copies": round(bytes_in_runs(token_of_row[row_MRT], copies=False) / plain, 3),
        "in runs": round(bytes_in_runs(token_of_row[row_MRT], copies=True) / plain, 3),
    }


def main() -> int:
    documents = StandardLibrary().documents()
    texts = [documents[index].read() for index in np.random.default_rng(0).permutation(len(documents))]
    tokenizer = trained(texts)
    tokens = np.concatenate([np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)])
    half = len(tokens) // 2
    by_popularity = np.argsort(-np.bincount(tokens[:half], minlength=VOCABULARY), kind="stable")
    earlier, later = np.split(np.argsort(by_popularity)[tokens], [half])
    found: dict[str, Any] = {"tokens of the text": len(tokens)}
    limits = {}
    for length, num_microbatches in itertools.product((512, 4096), (1, 4, 16)):
        name = f"sequences of {length}, {num_microbatches} micro-batches"
        found[name] = ratios(
            draw(earlier, num_microbatches, length, 0), draw(later, num_microbatches, length, 1), by_popularity
        )
        limits[f"in runs, {name}"] = found[name]["in runs"], MOST
    return publish("bytes of the look-up over a plain one's", found, limits)


if __name__ == "__main__":
    sys.exit(main())
